import json
import os
import subprocess
import sys
from dataclasses import make_dataclass
from pathlib import Path

import mlx.nn as nn
import pytest
from mlx_lm.models import bailing_hybrid
from processes import free_ports

from pptrain.cli import main
from pptrain.errors import ConfigError
from pptrain.shrink import shrunk, tiny_config, with_defaults
from pptrain.sound import refuse_broken
from pptrain.target import find_target

LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 30,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 1000,
}

OWN = """
import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.llama import Model as Llama, ModelArgs as LlamaArgs

class Model(Llama):
    def __init__(self, args):
        super().__init__(args)

class Wide(Model):
    def __init__(self, args):
        if args.hidden_size % 96:
            raise ValueError(f"a width of {args.hidden_size}")
        super().__init__(args)

class WideLater(Model):
    def __call__(self, inputs):
        return super().__call__(inputs) * mx.ones((96,)).reshape(-1, self.args.hidden_size).min()

class Never(Model):
    def __call__(self, inputs):
        raise ValueError("never")

class FromDict(Llama):
    def __init__(self, config):
        assert type(config) is dict
        super().__init__(LlamaArgs.from_dict(config))
        config.clear()
"""


def written(folder, config):
    path = folder / "its.json"
    path.write_text(json.dumps(config))
    return path


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A directory with modules of a user's own, which can be imported by another name in every test."""
    name = f"own_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(OWN)
    (tmp_path / f"{name}_args.py").write_text(OWN + "\nModelArgs = LlamaArgs\n")
    monkeypatch.syspath_prepend(tmp_path)
    return name


# -- module:Class ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("module", "name"), [("", "FromDict"), ("_args", "Model")])
def test_a_class_is_called_with_its_config_shrunk(own, module, name, tmp_path):
    target = find_target(f"{own}{module}:{name}", 3, config=written(tmp_path, LLAMA))
    for _ in range(2):
        model = target.build()
        assert (type(model).__name__, len(model.layers), model.args.hidden_size) == (name, 3, 64)


def test_a_class_is_called_with_its_config_in_full_size(own, tmp_path):
    small = {**LLAMA, "hidden_size": 48, "num_hidden_layers": 2}
    model = find_target(f"{own}_args:Model", full_size=True, config=written(tmp_path, small)).build()
    assert (len(model.layers), model.args.hidden_size, model.args.vocab_size) == (2, 48, 1000)


def test_a_class_with_a_config_is_validated_by_itself_and_among_others(own, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    options = ["--config", str(written(tmp_path, LLAMA)), "--quick", "--variants", "full", "--stages", "2"]
    assert main(["validate", f"{own}_args:Model", *options]) == 0
    assert "ok " in capsys.readouterr().out
    assert main(["validate", f"{own}_args:Model", "llama", *options]) == 0
    assert "2 models: 2 ok" in capsys.readouterr().out


def test_a_class_that_needs_arguments_is_a_user_s_mistake_that_names_config(own, capsys):
    assert main(["validate", f"{own}:Model"]) == 2
    said = capsys.readouterr().err
    assert f"[target] {own}:Model was called without arguments and raised TypeError" in said
    assert "--config FILE" in said


@pytest.mark.parametrize("text", [":Model", "own:", ":", ".own:Model", "..:Model"])
def test_a_class_without_a_module_or_a_module_without_a_class_is_a_user_s_mistake(text, capsys):
    assert main(["validate", text]) == 2
    assert f"[target] '{text}' lacks a module or a class" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["no.such.type", "nobody/nothing-2.5"])
def test_a_name_with_a_dot_that_is_nothing_is_a_user_s_mistake(text, tmp_path):
    closed = f"http://127.0.0.1:{free_ports(1)[0]}"
    environment = {**os.environ, "HF_ENDPOINT": closed, "HF_HOME": str(tmp_path)}
    for proxy in ("http_proxy", "https_proxy", "all_proxy"):
        environment.pop(proxy, None), environment.pop(proxy.upper(), None)
    command = [sys.executable, "-m", "pptrain", "validate", text]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2, done.stderr
    assert "[target]" in done.stderr


@pytest.mark.parametrize("option", [["--num-layers", "4"], ["--full-size"]])
def test_a_size_for_a_class_without_a_config_is_refused(option, capsys):
    assert main(["validate", "odd_models:TwoStreams", *option]) == 2
    assert f"{' '.join(option)} cannot be followed by odd_models:TwoStreams" in capsys.readouterr().err


def test_real_sizes_of_what_has_none_are_refused(tmp_path, capsys):
    assert main(["validate", "llama", "--full-size"]) == 2
    assert "--full-size cannot be followed by llama, a model type" in capsys.readouterr().err
    assert main(["validate", str(written(tmp_path, LLAMA)), "--full-size", "--num-layers", "3"]) == 2
    assert "--full-size keeps the layers of the config, and --num-layers 3" in capsys.readouterr().err


def test_what_makes_no_model_is_a_mistake(tmp_path):
    with pytest.raises(ConfigError, match=r"collections:OrderedDict made a OrderedDict. Expected an mlx.nn.Module"):
        find_target("collections:OrderedDict")
    with pytest.raises(ConfigError, match="says model_type 'base', which is a part of mlx-lm and no model"):
        find_target(str(written(tmp_path, {**LLAMA, "model_type": "base"})))


def test_a_config_without_a_class_is_refused(tmp_path, capsys):
    assert main(["validate", "llama", "--config", str(written(tmp_path, LLAMA))]) == 2
    assert "is for `module:Class`, and there is none in llama" in capsys.readouterr().err


def test_the_installed_program_finds_modules_in_the_current_directory(own, tmp_path):
    program = tmp_path / "bin" / "pptrain"
    program.parent.mkdir()
    program.write_text("from pptrain.cli import script\nscript()\n")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, str(program), "validate", f"{own}_args:Model", "--config", written(tmp_path, LLAMA)]
    options = ["--quick", "--variants", "full", "--stages", "2"]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, check=False, env=environment, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")


# -- shrinking that did not succeed ------------------------------------------------------------------------------------

ODD_NAMES = """
import mlx.core as mx
import mlx.nn as nn

class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        depth, width = config.get("n_blocks") or config["num_layers"], config.get("breadth", 8)
        self.embed = nn.Embedding(96, width)
        self.layers = [nn.Linear(width, width) for _ in range(depth)]

    def __call__(self, tokens):
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = mx.tanh(layer(hidden))
        return self.embed.as_linear(hidden)
"""


@pytest.fixture
def odd(own, tmp_path):
    (tmp_path / f"{own}_odd.py").write_text(ODD_NAMES)
    return f"{own}_odd:Model"


@pytest.mark.parametrize("num_layers", [None, 5])
def test_a_number_of_layers_by_an_unknown_name_is_refused_and_the_known_names_are_said(odd, num_layers, tmp_path):
    config = written(tmp_path, {"n_blocks": 7})
    with pytest.raises(ConfigError, match=r"has 7 layers where [45] were asked for.*num_hidden_layers, .*--full-size"):
        find_target(odd, num_layers, config=config)
    assert len(find_target(odd, full_size=True, config=config).build().layers) == 7


def test_more_layers_than_a_config_has_are_refused_and_fewer_than_show_a_pattern_are_not(odd, tmp_path):
    config = written(tmp_path, {"num_layers": 2})
    with pytest.raises(ConfigError, match=r"has 2 layers where 3 were asked for: its config says 2\."):
        find_target(odd, 3, config=config)
    assert len(find_target(odd, config=config).build().layers) == 2


def test_layers_that_a_part_of_a_config_counts_are_known(own, tmp_path):
    (tmp_path / f"{own}_part.py").write_text(
        ODD_NAMES.replace("(self, config):", "(self, whole):\n        config = whole['lm']")
    )
    config = written(tmp_path, {"vision_config": {"num_layers": 9}, "lm": {"num_layers": 2}})
    assert len(find_target(f"{own}_part:Model", config=config).build().layers) == 2


def test_a_large_model_by_unknown_names_is_refused_and_not_built(odd, tmp_path):
    config = written(tmp_path, {"num_layers": 60, "breadth": 300_000})  # 360 GB a layer
    with pytest.raises(ConfigError, match=r"parameters; the largest is layers.0.weight \(300000, 300000\)"):
        find_target(odd, config=config)
    assert find_target(odd, full_size=True, config=config)


def test_a_large_config_of_mlx_lm_is_refused_too(tmp_path):
    config = {
        "model_type": "openelm",
        "head_dim": 64,
        "num_transformer_layers": 4,
        "model_dim": 512,
        "vocab_size": 1000,
    }
    config |= {
        "ffn_dim_divisor": 256,
        "ffn_multipliers": [4.0] * 4,
        "num_query_heads": [12] * 4,
        "num_kv_heads": [3] * 4,
    }
    assert len(find_target(str(written(tmp_path, config))).build().layers) == 4
    path = written(tmp_path, {**config, "ffn_dim_divisor": 1 << 20})  # whose name says no size
    with pytest.raises(ConfigError, match=r"the largest is .*ffn.proj_1.weight \(2097152, 64\).*--full-size"):
        find_target(str(path))


# -- heads -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("real", "tiny"), [((32, 32), (4, 4)), ((32, 8), (4, 2)), ((32, 1), (4, 1)), ((2, 2), (2, 2))])
@pytest.mark.parametrize(
    ("all_of_them", "part"),
    [
        ("num_attention_heads", "num_key_value_heads"),
        ("num_attention_heads", "num_kv_heads"),
        ("num_attention_heads", "num_global_key_value_heads"),
        ("num_attention_heads", "num_attention_groups"),
        ("num_attention_heads", "n_shared_head"),
        ("num_heads", "num_kv_heads"),
        ("n_heads", "n_kv_heads"),
        ("n_heads", "kv_n_heads"),
        ("n_head", "n_kv_heads"),
        ("swa_num_attention_heads", "swa_num_key_value_heads"),
        ("num_swa_attention_heads", "num_swa_key_value_heads"),
        ("num_attention_heads", "swa_num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    ],
)
def test_ratios_of_heads_are_kept_by_every_name(all_of_them, part, real, tiny):
    small = shrunk({all_of_them: real[0], part: real[1], "num_layers": 9}, range(4))
    assert (small[all_of_them], small[part]) == tiny


def test_heads_of_the_config_around_count_for_a_part_of_it():
    whole = {"n_heads": 48, "attn_config": {"kv_n_heads": 8}, "text_config": {"n_heads": 8, "kv_n_heads": 8}}
    assert shrunk(whole, range(4)) == {
        "n_heads": 4,
        "attn_config": {"kv_n_heads": 2},
        "text_config": {"n_heads": 4, "kv_n_heads": 4},
    }


def test_sliding_windows_have_heads_of_their_own():
    heads = {"num_attention_heads": 40, "num_key_value_heads": 2, "num_swa_attention_heads": 20}
    small = shrunk({**heads, "num_swa_key_value_heads": 20}, range(4))
    assert list(small.values()) == [4, 2, 4, 4]


def test_a_module_that_raises_anything_when_it_is_imported_is_a_mistake(tmp_path, monkeypatch):
    (tmp_path / "broken_model.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"broken_model:Model: ZeroDivisionError: division by zero\. Expected"):
        find_target("broken_model:Model")


@pytest.mark.parametrize(("name", "raised"), [("Wide", "ValueError: a width of 64"), ("WideLater", "Cannot reshape")])
def test_a_config_that_shrinking_spoils_is_refused_and_not_told_as_a_failure_of_one_device(
    name, raised, own, tmp_path, capsys
):
    config = str(written(tmp_path, {**LLAMA, "hidden_size": 96, "num_hidden_layers": 4}))
    target = f"{own}_args:{name}"
    with pytest.raises(ConfigError, match=rf"{target} cannot be shrunk: with small sizes it raises .*{raised}"):
        find_target(target, config=Path(config))
    assert main(["validate", target, "--config", config, "--quick", "--layers", "2,2", "--full-size"]) == 0
    assert " ok " in capsys.readouterr().out


def test_a_model_that_fails_with_its_real_sizes_too_fails_on_one_device(own, tmp_path, capsys):
    assert main(["validate", f"{own}_args:Never", "--config", str(written(tmp_path, LLAMA)), "--quick"]) == 0
    assert "fails on one device" in capsys.readouterr().out


@pytest.mark.parametrize("full_size", [False, True])
@pytest.mark.parametrize(
    ("broken", "raised"),
    [
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "n_heads must be a multiple of n_kv_heads"),
        ({"hidden_size": -64}, "ValueError"),
        ({"hidden_size": "64"}, "TypeError"),
        ({"num_hidden_layers": -3}, "is not in list"),
    ],
)
def test_a_config_of_which_no_model_can_be_made_is_a_mistake_and_no_verdict(broken, raised, full_size, tmp_path):
    """Small sizes would mend the first: of 4 heads 3 is a number, of 4 heads 2 divide them."""
    config = written(tmp_path, {**LLAMA, "hidden_size": 64, "vocab_size": 96, **broken})
    with pytest.raises(ConfigError, match=rf"its.json makes no model: .*{raised}.*Correct the config") as error:
        find_target(str(config), full_size=full_size)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("model_type", ["bitnet", "olmo"])  # Metal only; a package that is not installed
def test_a_config_of_a_module_that_fails_with_any_values_is_a_verdict(model_type, tmp_path, capsys):
    config = written(tmp_path, {**LLAMA, "model_type": model_type, "rope_theta": 10000.0})
    assert main(["validate", str(config), "--quick"]) == 0
    assert "its.json fails on one device" in " ".join(capsys.readouterr().out.split())


def test_a_model_that_evaluates_with_its_config_only_is_not_refused():
    """mlx-lm trains it where nothing is compiled, and the verdict says so."""

    class Evaluating(nn.Module):
        def __call__(self, tokens):
            return tokens + tokens.sum().item()

    refuse_broken("it", Evaluating, nn.Identity)
    with pytest.raises(ConfigError, match=r"it makes no model: .*AttributeError"):
        refuse_broken("it", nn.Module, nn.Identity)


def test_a_class_that_cannot_be_made_from_its_config_is_a_mistake(own, tmp_path):
    config = written(tmp_path, {**LLAMA, "hidden_size": 100})
    with pytest.raises(ConfigError, match=r":Wide makes no model: .*ValueError: a width of 100\. Expected"):
        find_target(f"{own}_args:Wide", config=config)


def test_sizes_that_a_config_leaves_to_its_model_are_shrunk_too(tmp_path):
    """As the real one of gemma3, which gives neither heads nor vocabulary."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    args = (
        find_target(str(written(tmp_path, {"model_type": "gemma3", "text_config": text}))).build().language_model.args
    )
    small = (args.vocab_size, args.hidden_size, args.intermediate_size, args.num_attention_heads, args.head_dim)
    assert (small, args.num_key_value_heads, args.sliding_window) == ((96, 64, 96, 4, 16), 1, 4)
    assert args.query_pre_attn_scalar == 256, "no size"


@pytest.mark.parametrize("said", [{"n_layers": 6}, {"text_config": {"num_hidden_layers": 6}}])
def test_a_default_number_of_layers_does_not_count_beside_that_of_the_config(said):
    arguments = make_dataclass(
        "Arguments", [("num_layers", int, 24), ("vocab_size", int, 9000), ("is_tied", bool, True)]
    )
    whole = with_defaults({"model_type": "x", **said}, lambda config: {"x": arguments}.get(config.get("model_type")))
    assert whole == {"model_type": "x", "vocab_size": 9000, **said}


def test_a_number_of_layers_that_is_a_default_counts(tmp_path):
    mini = {key: value for key, value in LLAMA.items() if key != "num_hidden_layers"}
    config = written(tmp_path, {**mini, "model_type": "gemma3_text", "head_dim": 16})
    assert len(find_target(str(config)).build().layers) == 14, "of 26 layers each sixth has no window: 2 x 6 and 2"


# -- quantized ---------------------------------------------------------------------------------------------------------

WIDE = {"group_size": 64, "bits": 4}


def bits_of(target, name="mlp.down_proj"):
    """The bits of a module in every layer of a quantized model; None where it is not quantized."""
    model = target.build()
    target.quantize(model)
    return [getattr(dict(layer.named_modules())[name], "bits", None) for layer in model.layers]


def test_a_config_that_says_nothing_of_it_is_quantized_to_4_bits(tmp_path):
    target = find_target(str(written(tmp_path, LLAMA)))
    assert bits_of(target) == [4] * 4
    assert target.quantize(target.build()) == []


def test_a_quantized_config_is_tried_as_it_says_and_where_it_cannot_be_that_is_said(tmp_path):
    own = {"model.layers.1.mlp.down_proj": {"group_size": 64, "bits": 6}, "model.layers.2.mlp.down_proj": False}
    own["model.layers.29.mlp.down_proj"] = {"group_size": 64, "bits": 8}  # a layer that is cut off
    target = find_target(str(written(tmp_path, {**LLAMA, "quantization": {**WIDE, **own}})), 4)
    assert bits_of(target) == [4, 6, None, 4]
    (note,) = target.quantize(target.build())
    assert note == (
        "groups of 32 instead of 64 in model.layers.0.mlp.down_proj and 2 more, whose tiny width 64 does not divide"
    )


@pytest.mark.parametrize("full_size", [False, True])
def test_modules_that_a_quantization_names_and_no_layer_has_are_told(tmp_path, full_size):
    small = {**LLAMA, "hidden_size": 64, "intermediate_size": 128}
    own = {"model.layers.99.mlp.down_proj": {"bits": 8}, "model.layers.0.nope": False}
    inside = {"model.layers.29.mlp.down_proj": {"group_size": 64, "bits": 8}}  # a layer that is cut off
    config = written(tmp_path, {**small, "quantization": {**WIDE, "group_size": 32, **own, **inside}})
    target = find_target(str(config), full_size=full_size)
    assert target.quantize(target.build())[-1] == (
        "no module model.layers.0.nope and 1 more, which the config's quantization names"
    )


@pytest.mark.parametrize("text", ["3", "null", '"llama"', '["model_type"]', "[" * 100_000])
def test_what_is_no_object_is_no_config(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"^\[target\] .*config.json.* Expected .*config.json"):
        find_target(str(path))


def test_a_quantization_that_mlx_does_not_have_is_a_mistake_and_no_verdict(tmp_path):
    config = written(tmp_path, {**LLAMA, "quantization": {**WIDE, "bits": 7}})
    with pytest.raises(ConfigError, match="'bits': 7"):
        find_target(str(config))


def test_a_quantized_config_of_a_class_is_tried_as_it_says(own, tmp_path):
    config = written(tmp_path, {**LLAMA, "quantization": {**WIDE, "bits": 3}})
    assert bits_of(find_target(f"{own}_args:Model", config=config)) == [3] * 4


def test_a_quantized_config_in_full_size_keeps_its_groups(tmp_path):
    small = {**LLAMA, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}
    target = find_target(str(written(tmp_path, {**small, "quantization": WIDE})), full_size=True)
    assert bits_of(target) == [None] * 2, "a width of 96 has no group of 64"
    assert bits_of(target, "mlp.up_proj") == [4] * 2
    assert target.quantize(target.build()) == []


def test_a_pattern_of_bits_gets_the_layers_to_show_it(tmp_path):
    high = {f"model.layers.{i}.mlp.down_proj": {"group_size": 64, "bits": 6} for i in range(2, 30, 3)}
    target = find_target(str(written(tmp_path, {**LLAMA, "quantization": {**WIDE, **high}})))
    assert bits_of(target) == [4, 4, 6] * 2


def test_layers_that_a_quantization_names_are_those_of_the_config(tmp_path):
    """Else the last two would be among them, with the numbers of others."""
    kinds = ["full_attention"] + ["sliding_attention"] * 27 + ["full_attention"] * 2
    config = {**LLAMA, "layer_types": kinds, "sliding_window": 512}
    full = [not layer.use_sliding for layer in find_target(str(written(tmp_path, config))).build().layers]
    assert full == [True, False, False, True, True]
    high = {"model.layers.2.mlp.down_proj": {"group_size": 64, "bits": 6}}
    target = find_target(str(written(tmp_path, {**config, "quantization": {**WIDE, **high}})))
    assert bits_of(target) == [4, 4, 6, 4, 4, 4, 4]
    assert [layer.use_sliding for layer in target.build().layers] == [False] + [True] * 6


def test_a_verdict_names_what_is_quantized_otherwise_than_the_config_says(tmp_path, capsys):
    config, verdicts = written(tmp_path, {**LLAMA, "quantization": WIDE}), tmp_path / "verdicts.json"
    options = ["--quick", "--layers", "2,2", "--json", str(verdicts)]
    assert main(["validate", str(config), *options]) == 0
    (verdict,) = json.loads(verdicts.read_text())
    assert verdict["word"] == "ok"
    assert verdict["notes"] == [
        "qlora has groups of 32 instead of 64 in model.layers.0.mlp.down_proj and 3 more, "
        "whose tiny width 64 does not divide"
    ]


def test_weights_that_mlx_lm_does_not_train_on_are_tried_as_such_but_not_quantized(tmp_path, capsys):
    config = {**LLAMA, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    assert main(["validate", str(written(tmp_path, config)), "--quick", "--layers", "2,2"]) == 0
    assert "(not tried: qlora)" in capsys.readouterr().out


# -- what shrinking keeps ----------------------------------------------------------------------------------------------

BY_LAYER = {"num_hidden_layers": 8, "num_attention_heads": 32, "hidden_size": 1024}


def test_layers_that_are_left_out_in_the_middle_leave_the_numbers_of_the_others():
    real = {**BY_LAYER, "limits": [0, 0, 0, 0, 0, 0, 7, 9], "dense_layers": [0, 6], "moe_layers": [1, 2, 5, 7, -1]}
    real["kinds"] = {"linear_layers": [1, 2, 3, 5, 6], "full_layers": [4, 8]}  # which count from one
    small = shrunk(real, [0, 1, 6, 7])
    assert (small["num_hidden_layers"], small["limits"]) == (4, [0, 0, 7, 9])
    assert (small["dense_layers"], small["moe_layers"]) == ([0, 2], [1, 3, -1])
    assert small["kinds"] == {"linear_layers": [1, 2], "full_layers": [4]}


def test_only_a_string_that_is_a_pattern_is_cut_by_layers():
    real = {**BY_LAYER, "topk_method": "noaux_tc", "hybrid_override_pattern": "MEM*MEM-"}
    small = shrunk(real, [0, 1, 6, 7])
    assert (small["topk_method"], small["hybrid_override_pattern"]) == ("noaux_tc", "MEM-")


def test_sizes_by_layer_are_shrunk_and_stay_different():
    real = {**BY_LAYER, "intermediate_size": [4096, 8192] * 4, "moe_topk": [8] * 8, "num_kv_heads": [3] * 8}
    real["block_configs"] = [{"attention": {"n_heads_in_group": 8}, "ffn": {"ffn_mult": 2.5}}] * 8
    small = shrunk(real, range(4))
    assert (small["intermediate_size"], small["moe_topk"]) == ([64, 96, 64, 96], [2] * 4)
    assert small["block_configs"] == [{"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 2.5}}] * 4
    assert shrunk({**BY_LAYER, "intermediate_size": [16, 8192] * 4}, range(2))["intermediate_size"] == [16, 96]
    assert small["num_kv_heads"] == [3] * 4, "which go with the others of the same layer"


def test_the_same_part_of_the_layers_shares_keys_and_values():
    shared = [shrunk({**BY_LAYER, "num_kv_shared_layers": n}, range(4))["num_kv_shared_layers"] for n in (0, 1, 4, 8)]
    assert shared == [0, 1, 2, 3]


@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(("own", "count"), [({}, 8), ({"head_dim": 128}, 2), ({"qk_rope_head_dim": 16}, 16)])
def test_a_scaling_s_factors_are_as_many_as_there_are_frequencies(own, count, where):
    factors = [1.0 + i for i in range(16)]
    real = {**BY_LAYER, **own, "num_hidden_layers": 16}
    real[where] = {"full_attention": {"type": "longrope", "short_factor": factors}, "mrope_section": [4, 6, 6]}
    thinned = factors[:: 16 // count]
    assert shrunk(real, range(4))[where] == {
        "full_attention": {"type": "longrope", "short_factor": thinned},
        "mrope_section": [4, 6, 6],
    }


@pytest.mark.parametrize(("part", "width"), [(0.334, 24), (0.5, 16), (1.0, 16), (0.3, 16)])
def test_the_part_of_a_head_that_rotates_is_even(part, width):
    small = shrunk({**BY_LAYER, "head_dim": 192, "partial_rotary_factor": part}, range(4))
    assert (small["head_dim"], int(small["head_dim"] * part) % 2) == (width, 0)


@pytest.mark.parametrize(
    ("architectures", "module"),
    [(["Other", "BailingMoeV3ForCausalLM"], "moe_v3"), ("BailingMoeV3ForCausalLM", "moe_v3"), ([], "hybrid")],
)
def test_an_architecture_may_decide_which_model_it_is_as_for_mlx_lm(architectures, module, tmp_path):
    config = tiny_config(bailing_hybrid, bailing_hybrid.ModelArgs, 4, {"hidden_act": "silu"})
    path = written(tmp_path, {**config, "model_type": "bailing_hybrid", "architectures": architectures})
    assert type(find_target(str(path)).build()).__module__ == f"mlx_lm.models.bailing_{module}"


def test_what_a_config_leaves_to_its_architecture_s_model_is_shrunk(tmp_path):
    config = {"model_type": "bailing_hybrid", "architectures": ["BailingMoeV3ForCausalLM"]}
    args = find_target(str(written(tmp_path, config))).build().args
    assert (args.hidden_size, args.vocab_size, args.num_hidden_layers < 24) == (64, 96, True)


@pytest.mark.parametrize(
    ("model_type", "said"), [(None, "no model_type"), (5, "5 as its model_type"), (["x"], r"\['x'\] as its model_type")]
)
def test_a_model_type_is_a_string(model_type, said, tmp_path):
    with pytest.raises(ConfigError, match=rf"its.json has {said}. Expected one, as `llama`"):
        find_target(str(written(tmp_path, {**LLAMA, "model_type": model_type})))
