import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import mlx.core as mx
import mlx.nn as nn
import odd_models
import pytest
from odd_models import built
from processes import free_ports

from pptrain.cli import main
from pptrain.errors import ConfigError
from pptrain.pattern import kinds_of, layers_to_show
from pptrain.shrink import shrunk
from pptrain.target import Target, every_name, find_target, of_type
from pptrain.validate import Plan, Verdict, _cuts, validate
from pptrain.verdicts import from_json, summary, to_html, to_json, to_junit

QUICK = Plan(max_whole=0, variants=("full", "lora"))

KINDS = {
    "llama": "one hidden state",
    "gemma3_text": "tied embeddings, sliding windows",
    "gemma3n": "several streams, changed in place behind the stack",
    "gemma4_text": "tuples with None; keys and values shared by later layers; inputs for each layer",
    "afm7": "two lists of layers; keys and values through a cache",
    "iquestloopcoder": "parts of layers, run twice",
    "nanbeige": "layers run once or more",
    "talkie": "the embedding read by every layer",
    "rwkv7": "a first layer's value that all others read",
    "mixtral": "experts",
    "mamba2": "state space",
    "falcon_h1": "attention and state space in one layer",
}
LAYERS = {"iquestloopcoder": 2, "nanbeige": 3}
"""Their layers count twice."""


@pytest.mark.parametrize("name", KINDS, ids=lambda name: f"{name}: {KINDS[name]}")
def test_a_model_with_this_kind_of_boundary_is_ok(name):
    verdict = validate(of_type(name, LAYERS.get(name, 4)), QUICK)
    assert (verdict.word, verdict.reason) == ("ok", "")
    assert verdict.num_runs == 2 * (verdict.num_cuts + 2)  # and the whole model in one stage, recomputed and not
    if name == "gemma3n":  # its layers read a weight that mlx-lm's own LoRA has moved
        assert ["lora of altup.modality_router, laurel.linear_left" in note for note in verdict.notes] == [True]
    else:
        assert verdict.notes == []


@pytest.mark.parametrize(
    "kind",
    [odd_models.TwoStreams, odd_models.ReadsTwoBefore, odd_models.SharedBlock, *odd_models.MENDED],
    ids=lambda kind: kind.__name__,
)
def test_a_model_that_mlx_lm_does_not_have_is_ok(kind):
    assert validate(Target(kind.__name__, lambda: built(kind)), Plan(max_whole=0)).word == "ok"


@pytest.mark.parametrize("kind", odd_models.WRONG, ids=lambda kind: kind.__name__)
def test_a_model_that_a_cut_would_break_is_never_ok(kind):
    verdict = validate(Target(kind.__name__, lambda: built(kind)), QUICK)
    assert verdict.word == "cannot be cut here"
    assert "layer" in verdict.reason


def test_a_reason_of_ours_is_whole_as_what_to_do_stands_at_its_end():
    verdict = validate(Target("Averaging", lambda: built(odd_models.Averaging)), QUICK)
    assert len(verdict.reason) > 300
    assert verdict.reason.endswith(".")


def test_a_model_without_layers_cannot_be_cut_whatever_one_device_makes_of_it():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.block, self.head = nn.Embedding(100, 8), nn.Linear(8, 8), nn.Linear(8, 100)

        def __call__(self, tokens):
            return self.head(mx.tanh(self.block(self.embed(tokens))))

    verdict = validate(Target("Plain", Plain), QUICK)
    assert verdict.word == "cannot be cut here"
    assert "has no `layers`" in verdict.reason


def test_a_pack_of_rotated_weights_is_ok():
    target = of_type("prism_hadamard_qwen35", 4)
    packed = [name for name, module in target.build().named_modules() if "Hadamard" in type(module).__name__]
    assert len(packed) == 4
    verdict = validate(target, Plan(max_whole=0, layers=(2, 2)))
    assert (verdict.word, verdict.notes) == ("ok", [])


def test_a_model_that_one_device_cannot_train_has_the_reason():
    verdict = validate(of_type("bitnet", 4), QUICK)
    assert verdict.word == "fails on one device"
    assert "Metal" in verdict.reason
    assert verdict.is_good


@pytest.mark.parametrize(
    ("kind", "otherwise"), [(odd_models.Counted, "ok"), (odd_models.Choosing, "cannot be cut here")]
)
def test_what_mlx_lm_s_own_step_cannot_be_compiled_of_fails_on_one_device_unless_nothing_is(
    kind, otherwise, monkeypatch
):
    target = Target(kind.__name__, lambda: built(kind))
    assert validate(target, QUICK).word == otherwise  # these tests run without `mx.compile`
    monkeypatch.delenv("MLX_DISABLE_COMPILE")
    verdict = validate(target, QUICK)
    assert (verdict.word, verdict.num_runs) == ("fails on one device", 0)
    assert re.search(r"eval .* \(odd_models.py:\d+\); in mlx-lm's own step, which is compiled", verdict.reason)
    monkeypatch.setenv("MLX_DISABLE_COMPILE", "1")
    assert validate(target, QUICK).word == otherwise  # and so they go on


def test_a_cut_that_adds_gradients_in_another_order_than_one_device_is_close_and_says_so():
    verdict = validate(Target("InTurn", lambda: built(odd_models.InTurn)), Plan(variants=("full",), layers=(2, 2)))
    assert verdict.word == "close"
    assert "one device adds gradients in turn from before and behind the cut at layer 2" in verdict.reason


def test_what_operations_make_between_layers_and_hide_is_close_and_says_so():
    verdict = validate(Target("Between", lambda: built(odd_models.Between)), Plan(variants=("full",), layers=(2, 2)))
    assert verdict.word == "close"
    assert "the first is embed.weight" in verdict.reason
    assert "one device adds gradients in turn from before and behind the cut at layer 2" in verdict.reason


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_a_parameter_that_stages_share_has_the_bound_of_its_dtype(dtype):
    def make():
        model = built(odd_models.Tiny, tied=True)
        model.set_dtype(dtype)
        return model

    assert validate(Target("tied", make), Plan(variants=("full",), max_whole=0)).word == "ok"


def test_a_model_that_could_be_tried_in_no_way_is_not_ok():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = mx.ones((8,))

        def __call__(self, hidden):
            return hidden * self.scale

    def make():
        model = built(odd_models.Tiny)
        model.layers = [Bare() for _ in range(4)]
        return model

    verdict = validate(Target("bare", make), Plan(variants=("lora",)))
    assert verdict.word == "fails on one device"
    assert "lora was not tried" in verdict.reason


def test_every_cut_is_tried_up_to_8_layers_and_some_are_drawn_above():
    def count(num_layers, num_stages):
        return len(list(_cuts(num_layers, Plan(stages=(num_stages,)))))

    assert [count(n, 2) for n in (4, 8, 12)] == [3, 7, 11]
    assert [count(n, 3) for n in (4, 8, 9, 12)] == [3, 21, 28, 28]
    assert count(8, 4) == 35  # more than are drawn above
    assert all(sum(layers) == 12 and min(layers) > 0 for layers in _cuts(12, Plan()))


# -- targets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kinds", "shown"),
    [
        ("a" * 24, "aaaa"),
        ("ab" * 12, "abab"),
        ("aaab" * 6, "aaab" * 2),
        ("a" + "b" * 23, "abbb"),  # dense first, then experts
        ("a" + "bc" * 11 + "b", "abcbcb"),  # ends in the middle of a period, and so does the tiny one
        ("abc" * 8 + "dd", "abcabcdd"),
        ("abc" * 8 + "add", "abcabcadd"),
        ("a" * 22 + "bc", "aabc"),
        ("aaaaaabbbbbbbbbcc", "aaaaaabbcc"),
        ("aaaaab" * 4, "aaaaab" * 2),
        ("aaaaaaab" * 4, "aaaaaaab" * 2),
        ("aaaaaaaaaab" * 4, "aaaaaaaaaabaaaaa"),  # more than is tried
        ("abcdefghijk", "abcdefghijk"),
        ("ab", "ab"),
    ],
)
def test_the_layers_to_show_have_the_pattern_twice_and_what_is_around_it_once(kinds, shown):
    assert "".join(kinds[layer] for layer in layers_to_show(kinds)) == shown


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("llama", "aaaaaaaaaaaa"),
        ("deepseek_v3", "abbbbbbbbbbb"),  # first_k_dense_replace
        ("jamba", "abababababab"),  # attn_layer_period
        ("mellum", "abababababab"),  # layer_types, which only the config has
        ("gemma3n", "ababababab" + "ac"),  # the last shares its keys and values
        ("nemotron_h", "abcdabcdabcd"),
    ],
)
def test_the_pattern_of_a_model_is_found_in_its_layers(name, pattern):
    kinds, letters = kinds_of(of_type(name, 12).build()), {}
    assert "".join(letters.setdefault(kind, "abcde"[len(letters)]) for kind in kinds) == pattern


def test_a_real_config_keeps_its_period_and_gets_the_layers_to_show_it(tmp_path):
    config = {"model_type": "gemma3_text", "hidden_size": 1152, "num_hidden_layers": 26, "intermediate_size": 6912}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window_pattern": 6, "sliding_window": 512}))
    model = find_target(str(tmp_path)).build()
    assert [layer.self_attn.is_sliding for layer in model.layers] == ([True] * 5 + [False]) * 2 + [True] * 2
    assert model.args.hidden_size == 64


def test_shrinking_keeps_patterns_ratios_and_scalings():
    real = {
        "model_type": "x",
        "hidden_size": 4096,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 20,
        "full_attn_idxs": [1, 3, 39],
        "attention_multiplier": 0.015625,
        "tie_word_embeddings": True,
    }
    small = shrunk(real, range(4))
    assert small["num_hidden_layers"] == 4
    assert small["layer_types"] == ["sliding_attention", "full_attention"] * 2
    assert small["full_attn_idxs"] == [1, 3]
    assert (small["num_attention_heads"], small["num_key_value_heads"]) == (4, 2)
    assert (small["attention_multiplier"], small["tie_word_embeddings"]) == (0.015625, True)


def test_a_config_is_a_target(tmp_path):
    config = {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 30, "intermediate_size": 1024}
    config |= {"num_attention_heads": 8, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for text in (str(tmp_path), str(tmp_path / "config.json")):
        model = find_target(text, 3).build()
        assert (len(model.layers), model.args.vocab_size) == (3, 96)
        assert model.args.num_key_value_heads == model.args.num_attention_heads


def test_a_class_is_a_target():
    assert type(find_target("odd_models:TwoStreams", 4).build()).__name__ == "TwoStreams"


@pytest.mark.parametrize("text", ["no_such_model", "odd_models:Nothing", "nothing_here:Model", "missing.json"])
def test_what_is_no_target_is_a_user_s_mistake(text):
    with pytest.raises(ConfigError, match=r"\[target\]"):
        find_target(text, 4)


def test_a_name_on_a_hub_that_does_not_answer_is_an_error_within_seconds(tmp_path):
    closed = f"http://127.0.0.1:{free_ports(1)[0]}"
    environment = {**os.environ, "HF_ENDPOINT": closed, "HF_HOME": str(tmp_path)}
    for proxy in ("http_proxy", "https_proxy", "all_proxy"):
        environment.pop(proxy, None), environment.pop(proxy.upper(), None)
    command = [sys.executable, "-m", "pptrain", "validate", "nobody/nothing"]
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2
    assert (
        f"[target] There is no config.json of nobody/nothing in the cache, and {closed} does not answer" in done.stderr
    )
    assert time.monotonic() - start < 15  # the hub's own client would go on trying for half a minute


def test_the_full_size_of_a_config_is_kept(tmp_path, capsys):
    config = {"model_type": "qwen3", "hidden_size": 48, "num_hidden_layers": 3, "intermediate_size": 80}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "rms_norm_eps": 1e-5}
    config |= {"vocab_size": 120, "max_position_embeddings": 256, "rope_theta": 10000.0, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = find_target(str(tmp_path), full_size=True).build().args
    assert {key: getattr(args, key) for key in config} == config
    options = ["--full-size", "--quick", "--variants", "full"]
    assert main(["validate", str(tmp_path), *options]) == 0
    assert "3 cuts, 5 runs" in capsys.readouterr().out


def test_every_model_of_mlx_lm_is_found_and_nothing_else():
    names = every_name()
    assert {"llama", "qwen3_moe", "nemotron-nas"} <= set(names)
    assert not {"base", "cache", "switch_layers"} & set(names)


def test_no_module_names_an_architecture():
    words = {name for name in every_name() if any(c.isdigit() for c in name)}
    for path in (Path(__file__).parents[1] / "pptrain").glob("*.py"):
        if path.stem in (
            "model",
            "trace",
            "replay",
            "structure",
            "segment",
            "stage",
            "pipeline",
            "shrink",
            "pattern",
            "validate",
        ):
            assert not {word for word in words if f'"{word}"' in path.read_text()}, path


# -- what is said ------------------------------------------------------------------------------------------------------

SOME = [
    Verdict("a", "ok", num_cuts=6, num_runs=12, seconds=1.5),
    Verdict("b", "close", "layers <1+3>: 1 of 9 gradients differ", notes=["layers <1+3>"]),
    Verdict("c", "fails on one device", "no kernel"),
    Verdict("d", "cannot be cut here", "layer 1"),
]


def test_verdicts_come_back_from_json():
    assert from_json(to_json(SOME)) == SOME


def test_junit_fails_what_is_close_or_cannot_be_cut():
    suite = ElementTree.fromstring(to_junit(SOME))
    assert [[child.tag for child in case] for case in suite] == [[], ["failure"], ["skipped"], ["failure"]]
    assert suite.get("failures") == "2"


def test_the_page_has_a_row_a_model_what_is_wrong_first_and_is_escaped():
    page = to_html(SOME)
    classes = re.findall(r'<tr class="(\w+)"><td class="word">(\w)</td>', page)
    assert classes == [("bad", "d"), ("doubtful", "b"), ("neutral", "c"), ("good", "a")]
    assert page.count("layers &lt;1+3&gt;") == 2, "in the reason and in the note"
    assert "<1+3>" not in page
    assert "<summary>1 note</summary>" in page
    assert "prefers-color-scheme: dark" in page
    assert "http" not in page


def test_the_summary_counts_each_verdict():
    assert summary(SOME) == "4 models: 1 ok, 1 fails on one device, 1 close, 1 cannot be cut here"


def test_the_exit_code_is_0_only_if_every_model_can_be_cut(tmp_path, capsys):
    options = ["--quick", "--variants", "full", "--stages", "2"]
    assert main(["validate", "odd_models:TwoStreams", *options, "--html", str(tmp_path / "page.html")]) == 0
    assert "ok" in capsys.readouterr().out
    assert "TwoStreams" in (tmp_path / "page.html").read_text()
    assert main(["validate", "odd_models:Overwriting", *options]) == 1
    assert main(["validate"]) == 2


def test_several_models_have_a_process_each(tmp_path):
    path = tmp_path / "all.json"
    command = [sys.executable, "-m", "pptrain", "validate", "llama", "bitnet", "--quick", "--variants", "full"]
    done = subprocess.run([*command, "--stages", "2", "--json", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [verdict.word for verdict in from_json(path.read_text())] == ["ok", "fails on one device"]
    assert "2 models: 1 ok, 1 fails on one device" in done.stdout


def test_a_wrong_target_among_several_is_a_mistake_and_no_verdict(capsys):
    options = ["--quick", "--variants", "full", "--stages", "2"]
    assert main(["validate", "llama", "nosuch", *options]) == 2
