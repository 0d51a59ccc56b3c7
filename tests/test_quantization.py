"""Quantized bases: as a config says, as mlx-lm makes them, and cut into stages."""

import itertools
from functools import cache

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.convert import mixed_quant_predicate_builder
from mlx_lm.utils import quantize_model
from tiny import assert_bit_equal, batch, put_lora_on, same_bits

from pptrain import Pipeline, reference
from pptrain.errors import ConfigError
from pptrain.microbatch import cross_entropy
from pptrain.quantization import Quantization, as_converted, fitted, quantization_of, quantize
from pptrain.segment import Cut
from pptrain.target import of_type

AFFINE = {"group_size": 32, "bits": 4, "mode": "affine"}
MXFP4 = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
MXFP8 = {"group_size": 32, "bits": 8, "mode": "mxfp8"}
NVFP4 = {"group_size": 16, "bits": 4, "mode": "nvfp4"}
WIDE = {"group_size": 64, "bits": 4, "mode": "affine"}

OF_GPT_OSS = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def how(model):
    """The mode, bits and group size of each quantized module, by its path."""
    modules = {path: module for path, module in model.named_modules() if "scales" in module}
    return {path: (getattr(m, "mode", "affine"), m.bits, m.group_size) for path, m in modules.items()}


def paths_of(model):
    leaves = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
    return [path for path, module in leaves if hasattr(module, "to_quantized")]


# -- what a config says ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "parameters"),
    [
        ({"quant_method": "mxfp4"}, MXFP4),
        ({"quant_method": "mxfp8"}, MXFP8),
        ({"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]}, MXFP8),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, AFFINE),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, NVFP4),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, NVFP4),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "group_size": 16}}, NVFP4),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, {**AFFINE, "group_size": 128}),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64}, WIDE),
        ({"group_size": 64, "bits": 4}, WIDE),
    ],
)
def test_what_mlx_lm_translates_is_read_so(other, parameters):
    assert quantization_of({"quantization_config": other}).parameters == parameters
    assert quantization_of({"text_config": {"quantization_config": other}}).parameters == parameters


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"quantization_config": None},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": 32, "scale_fmt": "ue8m0"}},
        {"text_config": [1, 2]},
    ],
)
def test_weights_that_are_loaded_as_they_are_have_no_quantization(config):
    assert quantization_of(config) is None


@pytest.mark.parametrize(
    "other",
    [
        {"quant_method": "bitnet"},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "gptq", "bits": 8},
        {"quant_method": "gptq", "bits": 4, "group_size": -1},
        {"quant_method": "awq", "bits": 4, "group_size": "128"},
        {"quant_method": "modelopt"},
        {"quant_method": "modelopt", "quantization": "NVFP4"},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
    ],
)
def test_what_mlx_lm_does_not_train_on_is_an_error_with_its_name(other):
    with pytest.raises(ValueError, match=f"quantization_config is of {other['quant_method']}.*expected awq or gptq"):
        quantization_of({"quantization_config": other})


@pytest.mark.parametrize(
    "said",
    [
        [1, 2],
        "4bit",
        {},
        {"bits": 4},
        {"group_size": 64},
        {"group_size": 64, "bits": 7},
        {"group_size": 48, "bits": 4},
        {"group_size": 64, "bits": "4"},
        {"group_size": 64, "bits": 4.0},
        {"group_size": 64, "bits": True},
        {"group_size": 64, "bits": 4, "mode": "mxfp4"},
        {"group_size": 64, "bits": 4, "mode": "other"},
        {"group_size": 64, "bits": 4, "mode": ["affine"]},
    ],
)
def test_what_mlx_does_not_have_is_a_mistake_of_the_config(said):
    message = r"^\[quantization\] The config's quantization is .*affine: groups of 32\|64\|128, bits 1\|2"
    with pytest.raises(ConfigError, match=message):
        quantization_of({"quantization": said})


@pytest.mark.parametrize("said", [4, "gptq", ["gptq"], {"bits": 4}])
def test_a_quantization_config_of_no_kind_is_a_mistake_of_the_config_and_told_by_its_key(said):
    with pytest.raises(ConfigError, match=r"^\[quantization\] The config's quantization_config is"):
        quantization_of({"quantization_config": said})


def test_what_mlx_does_not_have_for_one_module_is_told_with_its_path():
    with pytest.raises(ConfigError, match=r"quantization of a\.b is {'bits': 9}"):
        quantization_of({"quantization": {**WIDE, "a.b": {"bits": 9}}})
    assert quantization_of({"quantization": {**WIDE, "a.b": {"bits": 8}}}).modules == {"a.b": {"bits": 8}}


@pytest.mark.parametrize("value", ["8bit", 8, [8], None])
def test_what_is_said_of_one_module_is_parameters_or_whether(value):
    with pytest.raises(ConfigError, match=r"quantization of a\.b is "):
        quantization_of({"quantization": {**WIDE, "a.b": value}})


def test_a_configs_own_modules_have_their_bits_or_none():
    said = {**AFFINE, "lm_head": False, "model.layers.1.mlp.down_proj": {"group_size": 32, "bits": 6}}
    model = of_type("llama", 2).build()
    quantize(model, quantization_of({"quantization": {**said, "model.layers.7.mlp.down_proj": {"bits": 2}}}))
    found = how(model)
    assert found.pop("model.layers.1.mlp.down_proj") == ("affine", 6, 32)
    assert "lm_head" not in found
    assert set(found.values()) == {("affine", 4, 32)}
    assert {"model.embed_tokens", "model.layers.0.mlp.down_proj"} <= set(found)


def test_what_a_model_itself_does_not_want_quantized_is_left_unless_the_config_names_it():
    class Choosy(nn.Sequential):
        def quant_predicate(self, path, _):
            return path == "layers.0"

    model = Choosy(*(nn.Linear(32, 32) for _ in range(3)))
    quantize(model, Quantization(AFFINE, {"layers.2": {"group_size": 32, "bits": 8}}))
    assert how(model) == {"layers.0": ("affine", 4, 32), "layers.2": ("affine", 8, 32)}


def test_the_published_gpt_oss_has_quantized_experts_and_nothing_else():
    model = of_type("gpt_oss", 2).build()
    quantize(
        model, quantization_of({"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": OF_GPT_OSS}})
    )
    experts = [f"model.layers.{i}.mlp.experts.{name}_proj" for i in range(2) for name in ("gate", "up", "down")]
    assert how(model) == dict.fromkeys(experts, ("mxfp4", 4, 32))


@pytest.mark.parametrize(
    ("other", "left"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, {"lm_head", "model.embed_tokens"}),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "lm_head": True}, {"model.embed_tokens"}),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "ignore": ["lm_head", "re:.*0.*o_proj$"],
            },
            {"lm_head", "model.embed_tokens", "model.layers.0.self_attn.o_proj"},
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.layers.1*"]},
            {"lm_head", "model.embed_tokens", "model.layers.1"},
        ),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 32, "modules_to_not_convert": "o_proj"},
            {"lm_head", "model.embed_tokens", *(f"model.layers.{i}.self_attn.o_proj" for i in range(2))},
        ),
    ],
)
def test_what_another_program_left_as_it_was_is_left(other, left):
    model = of_type("llama", 2).build()
    paths = paths_of(model)
    quantize(model, quantization_of({"quantization_config": other}))
    found = {path for path in paths if path not in how(model)}
    assert found == {path for path in paths if any(path.startswith(name) for name in left)}


# -- as mlx-lm makes them ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parameters", [WIDE, {**WIDE, "bits": 3}, MXFP4, NVFP4], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt_oss", "jamba"])
def test_a_model_is_quantized_as_mlx_lm_converts_it_and_as_the_config_of_that_says(name, parameters):
    theirs, mine, loaded = (of_type(name, 2).build() for _ in range(3))
    _, config = quantize_model(theirs, {}, **parameters)
    quantize(mine, fitted(mine, as_converted(mine, parameters))[0])
    skipped = {path for path in paths_of(loaded) if path not in how(theirs)}
    config["quantization"] |= dict.fromkeys(skipped, False)
    quantize(loaded, quantization_of(config))
    assert_bit_equal(loaded.parameters(), theirs.parameters())
    assert {path: said for path, said in how(mine).items() if path not in skipped} == how(theirs)


@pytest.mark.parametrize("recipe", ["mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6"])
def test_a_recipe_is_mlx_lms(recipe):
    theirs, mine = (of_type("qwen3", 9).build() for _ in range(2))
    quantize_model(theirs, {}, 32, 4, quant_predicate=mixed_quant_predicate_builder(recipe, theirs, 32))
    quantize(mine, as_converted(mine, AFFINE, recipe))
    assert_bit_equal(mine.parameters(), theirs.parameters())
    assert len(set(how(mine).values())) == 2


# -- tiny widths -------------------------------------------------------------------------------------------------------


def test_groups_get_smaller_where_a_tiny_width_has_no_room_for_them():
    model = of_type("llama", 2).build()  # of widths 64 and 96
    own = {"model.layers.0.mlp.gate_proj": {"group_size": 128, "bits": 8}, "model.layers.1.mlp.gate_proj": False}
    fits, notes = fitted(model, Quantization(WIDE, own))
    quantize(model, fits)
    found = how(model)
    assert found["model.layers.0.self_attn.q_proj"] == ("affine", 4, 64)
    assert found["model.layers.0.mlp.down_proj"] == ("affine", 4, 32)
    assert found["model.layers.0.mlp.gate_proj"] == ("affine", 8, 64)
    assert "model.layers.1.mlp.gate_proj" not in found
    assert sorted(notes) == [
        "groups of 32 instead of 64 in model.layers.0.mlp.down_proj and 1 more, whose tiny width 64 does not divide",
        "groups of 64 instead of 128 in model.layers.0.mlp.gate_proj, whose tiny width 128 does not divide",
    ]


def test_a_module_that_no_group_fits_stays_as_it_is():
    model = nn.Sequential(nn.Linear(24, 32), nn.Linear(32, 24))
    fits, notes = fitted(model, Quantization(MXFP4))
    quantize(model, fits)
    assert how(model) == {"layers.1": ("mxfp4", 4, 32)}
    assert notes == ["no quantized layers.0, whose tiny width no group of mxfp4 divides"]


def test_parameters_without_a_group_size_have_the_one_of_their_mode():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(96, 64))
    fits, _ = fitted(model, Quantization(AFFINE, {"layers.0": {"bits": 8}, "layers.1": {"bits": 8}}))
    quantize(model, fits)
    assert how(model) == {"layers.0": ("affine", 8, 64), "layers.1": ("affine", 8, 32)}


# -- cut into stages ---------------------------------------------------------------------------------------------------

BASES = {
    **{f"affine {bits} bit": ({**AFFINE, "bits": bits}, None) for bits in (3, 4, 6, 8)},
    "mxfp4": (MXFP4, None),
    "mxfp8": (MXFP8, None),
    "nvfp4": (NVFP4, None),
    "mixed_4_6": (AFFINE, "mixed_4_6"),
}
LAYERS = {"llama": 3, "qwen3_moe": 3, "gpt_oss": 4}
"""Dense, with experts, and with experts of biases whose published weights are mxfp4."""


def lora_of(name, base=None):
    """A tiny model in bfloat16, as the files of which mlx-lm makes quantized ones, with LoRA on top of its base."""
    model = of_type(name, LAYERS[name]).build()
    model.set_dtype(mx.bfloat16)
    if base is not None:
        quantize(model, fitted(model, as_converted(model, *BASES[base]))[0])
    put_lora_on(model)
    return model


def cuts_of(num_layers):
    ends = [cut for count in (1, 2) for cut in itertools.combinations(range(1, num_layers), count)]
    return [tuple(b - a for a, b in itertools.pairwise([0, *cut, num_layers])) for cut in ends]


def crossings(model, num_layers):
    """What crosses before every layer and behind the last, forward and backward."""
    tokens = batch(2)[0][:, :-1]
    look = Cut.of(model, tokens, cross_entropy).look(tokens)
    return [(look.crossing(site), look.returning(site)) for site in range(1, num_layers + 1)]


@cache
def crossings_of(name):
    return crossings(lora_of(name), LAYERS[name])


def test_the_kinds_of_base_differ_as_their_names_say():
    kinds = {base: {kind[:2] for kind in how(lora_of("qwen3_moe", base)).values()} for base in BASES}
    routers = {("affine", 8)}  # as the model itself wants
    assert kinds["mixed_4_6"] == {("affine", 4), ("affine", 6)}
    assert [kinds[f"affine {bits} bit"] for bits in (3, 4, 6, 8)] == [{("affine", b)} | routers for b in (3, 4, 6, 8)]
    assert [kinds[mode] for mode in ("mxfp4", "mxfp8", "nvfp4")] == [
        {("mxfp4", 4)} | routers,
        {("mxfp8", 8)} | routers,
        {("nvfp4", 4)} | routers,
    ]


@pytest.mark.parametrize(
    ("name", "base"),
    [*itertools.product(["llama", "qwen3_moe"], BASES), ("gpt_oss", "mxfp4"), ("gpt_oss", "affine 8 bit")],
)
def test_every_cut_of_a_quantized_base_is_one_device_and_is_crossed_by_activations_alone(name, base):
    model = lora_of(name, base)
    one = reference.value_and_grad(model, *batch(2), 2)
    for layers in cuts_of(LAYERS[name]):
        result = Pipeline(model, layers=layers, schedule="zb-h1").value_and_grad(*batch(2), 2)
        assert same_bits(result.loss, one.loss), layers
        assert_bit_equal(result.grads, one.grads)
    assert crossings(model, LAYERS[name]) == crossings_of(name)
