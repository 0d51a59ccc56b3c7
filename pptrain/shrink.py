"""A tiny model of an architecture: made from its argument class alone, or from a real config whose structure it keeps.

Sizes are recognised by the names that configs give them; what is no size (scalings, switches, patterns) stays as it is.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

Config = dict[str, Any]

LAYER_FIELDS = ("num_hidden_layers", "num_layers", "num_transformer_layers", "n_layers", "n_layer")
"""How configs name the number of layers."""

_OTHER_SENSES = re.compile("vision|audio")
"""Whose configs say nothing of the language model's layers."""

_SIZES: tuple[tuple[str, Any], ...] = (
    # The first pattern that matches the whole name of a field decides. Widths are multiples of 32, for quantization.
    (r"(quantization|quantization_config|vision_config|rope_scaling|.*_token_ids?)", None),
    (r"num_kv_reuse_layers|num_kv_shared_layers|num_dense_layers|first_k_dense_replace", 1),
    (r"num_nextn_predict_layers|(add_)?mtp.*", 0),
    ("|".join(LAYER_FIELDS), "layers"),
    (r".*(intermediate_size|ffn_hidden_size|ff_dim|expert_dim|n_inner)(_mlp)?", 96),
    (r"hidden_size_per_layer_input|hidden_size_per_head", 16),
    (
        r"hidden_size|hidden_dim|n_embd|n_embed|d_model|model_dim|dim|block_dim|mamba_d_ssm|lru_width|out_hidden_size",
        64,
    ),
    (r"dim_model_base|dense_attention_every_n_layers", 2),
    (r".*_layer_period|sliding_window_pattern|full_attention_interval|global_attn_every_n_layers|layer_group_size", 2),
    (r"no_rope_layer_interval|attn_res_block_size|mamba_step|cla_share_factor|num_loops|loop_num", 2),
    (r".*_layer_offset", 1),
    (r"conv_window", 2),
    (r"num_(global_|swa_)?key_value_heads|swa_num_key_value_heads|(n|num)_kv_heads|linear_num_key_heads", 2),
    (r"num_attention_groups|n_shared_head|n_groups|mamba_n_groups|o_groups|group_norm_size", 2),
    (r"num_query_groups|.*(num|n)_(swa_)?(attention_|value_)?heads?|(n|num)_heads?|(mamba|index)_n(um)?_heads", 4),
    (r"qk_head_dim", 32),
    (r"rotary_dim", 8),
    (r".*head_dim|mamba_d_head|kv_channels|linear_attn_head_dim", 16),
    (r".*lora_rank|.*low_rank_dim|moe_latent_size", 32),
    (r"mamba_dt_rank|time_step_rank", 8),
    (r".*(state_size|d_state)", 16),
    (r"mamba_expand|mamba_d_expand|expand", 2),
    (r".*(num|n_routed|num_local|moe_num)_experts", 4),
    (r".*zero_expert_num|emb_neighbor_num|emb_split_num|hc_mult", 2),
    (r"num_experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts", 2),
    (r".*(num|n)_shared_experts?", 1),
    (r"n_group|num_expert_group", 2),
    (r"topk_group", 1),
    (r".*vocab.*_ratio", 3),
    (r".*vocab.*|image_feature_size", 96),
    (r".*(conv_kernel.*|d_conv|conv_L_cache|conv1d_width|conv_window|conv_kernel_size|conv_kernel_dim)", 4),
    (r".*window(_size)?", 4),
    (r"index_topk|.*topk_blocks|candidate_block_size|index_block_size|block_multiple_of", 4),
    (r".*chunk_size|block_size", 8),
    (r"original_max_position_embeddings|max_position_embeddings|n_positions|n_ctx|model_max_length", 128),
)

_DEFAULTS: tuple[tuple[str, Any], ...] = (
    # What a field gets that has no default and is no size.
    (r"rope_theta|rotary_emb_base|.*_base", 10000.0),
    (r".*eps(ilon)?", 1e-5),
    (r"partial_rotary_factor|rotary_pct", 0.5),
    (r"time_step_limit", (0.001, 100.0)),
    (r"rope_parameters", {"rope_theta": 10000.0, "type": "default", "rope_type": "default", "factor": 1.0}),
    (r"hidden_act|hidden_activation|mlp_hidden_act|activation", "silu"),
    (r"scoring_func|score_func.*", "sigmoid"),
    (r"topk_method", "noaux_tc"),
    (r"zero_expert_type", "identity"),
    (r"attention_method", "MLA"),
    (r"sliding_window_pattern", "LG"),
    (r"attn_config", {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}),
    (r"ffn_config", {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2}),
    (r"query_pre_attn_scalar", 16.0),
    (r".*_idx", 0),
    (r"activation_sparsity_pattern", 0.5),
    (r"moe_layer_freq|decoder_sparse_step|.*interval|.*_step", 1),
)

_LAYER_WORDS = ("sliding_attention", "full_attention", "linear_attention", "conv", "mamba", "attention", "recurrent")
"""How configs name the kinds of layers; those that a module's source mentions take turns."""

_PATTERN = re.compile(
    r".*_layer_period|.*_layer_offset|sliding_window_pattern|full_attention_interval|layer_group_size|attn_res_block_size"
    r"|global_attn_every_n_layers|dense_attention_every_n_layers|no_rope_layer_interval|mamba_step|cla_share_factor"
)
"""Sizes that say which layers are alike: in a real config they stay."""

_SHARING = re.compile(r"num_kv_reuse_layers|num_kv_shared_layers")
"""Numbers of layers that share something with others: in a real config the same part of all stays."""


_ROTARY = ("rope_scaling", "rope_parameters")
"""What configs say of the rotary embedding, which stays but for what is as long as a head is wide."""

_HEADS = ("num_attention_heads", "n_heads", "n_head", "num_heads")

_PARTS_OF_HEADS: tuple[tuple[str, tuple[str, ...]], ...] = (
    # Numbers that divide a number of heads, and what that one is called; the first that the config has decides.
    (r"linear_num_key_heads", ("linear_num_value_heads",)),
    (
        r"(swa_num|num_swa)_key_value_heads",
        ("swa_num_attention_heads", "num_swa_attention_heads", *_HEADS),
    ),
    (
        r"num_(global_)?key_value_heads|(n|num)_kv_heads|kv_n_heads|num_attention_groups|n_shared_head|n_heads_in_group",
        _HEADS,
    ),
)

_ROPE: Config = {
    "rope_theta": 10000.0,
    "type": "default",
    "rope_type": "default",
    "factor": 1.0,
    "alpha": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0,
    "original_max_position_embeddings": 128,
    "llama_4_scaling_beta": 0.1,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0] * 8,
}
_NUMBERS: Config = {"routed_scaling_factor": 1.0, "norm_topk_prob": True}
_ROPES = {**_ROPE, "full_attention": _ROPE, "sliding_attention": _ROPE}


def completions(module: ModuleType, num_layers: int) -> list[Config]:
    """What argument classes may need beyond what their types say; each is tried together with those before it."""
    numbers = range(num_layers)
    words = layer_words(module)
    kinds = [words[i % len(words)] for i in numbers] if words else None
    block = {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}}
    lists: Config = {
        "layer_types": kinds,
        "block_types": kinds and list(reversed(kinds)),
        "layers_block_type": (["mamba", "attention", "moe", "mlp"] * num_layers)[:num_layers],
        "block_configs": [block] * num_layers,
        "layer_rope_theta": [10000.0 * (i % 2) for i in numbers],
        "mlp_layer_types": ["sparse"] * num_layers,
        "num_query_heads": [4] * num_layers,
        "num_kv_heads": [2] * num_layers,
        "ffn_multipliers": [1.5] * num_layers,
        "linear_attn_config": {
            "kda_layers": [i + 1 for i in numbers if i % 2 == 0],
            "full_attn_layers": [i + 1 for i in numbers if i % 2],
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
    }
    return [
        {},
        lists,
        {"rope_theta": 10000.0, "rope_parameters": _ROPES, "rope_scaling": _ROPE},
        {"num_shared_experts": 0},
        {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "num_experts_per_tok": 1, **_NUMBERS},
    ]


def layer_words(module: ModuleType) -> list[str]:
    """The kinds of layers that a module's source mentions."""
    source = inspect.getsource(module)
    words = [word for word in _LAYER_WORDS if f'"{word}"' in source]
    return [*words, "conv"] if len(words) == 1 else words  # compared with one: anything else is the other kind


def tiny_config(module: ModuleType, arguments: type, num_layers: int, completion: Mapping[str, Any]) -> Config:
    """Tiny values for an argument class; a completion takes the place of what would be invented or None."""
    config: Config = {}
    for field in dataclasses.fields(arguments):
        default = _default(field)
        if field.name in completion and completion[field.name] is not None:
            config[field.name] = completion[field.name]
            continue
        is_text = default is dataclasses.MISSING and ("str" in str(field.type) or "List" in str(field.type))
        value = default if is_text else _tiny(field.name, default, num_layers)
        config[field.name] = _invented(field, module, num_layers) if value is dataclasses.MISSING else value
    config["model_type"] = module.__name__.rsplit(".", 1)[-1]
    return {key: value for key, value in config.items() if value is not dataclasses.MISSING}


def shrunk(config: Mapping[str, Any], layers: Sequence[int], around: Mapping[str, Any] | None = None) -> Config:
    """A real config with small sizes: patterns, ratios of heads, switches and scalings stay.

    Lists with one entry for each layer keep those of the layers that stay; lists of layer numbers get their new ones.

    Args:
        config: The real one.
        layers: Those that stay, of as many as there are.
        around: The config that this one is a part of, which may have the number of heads and of layers.
    """
    known = {**(around or {}), **config}
    real = count_layers_of(config) or count_layers_of(known)
    kept = [layer for layer in layers if real is None or layer < real]
    first = _first_number(config, real)
    tiny = {key: _shrunk(key, value, known, real, kept, first) for key, value in config.items()}
    before, after = _rotated(known), _rotated({**known, **tiny})
    if not before or not after:
        return tiny
    return {key: _with_factors(value, after / before) if key in _ROTARY else value for key, value in tiny.items()}


def count_layers_of(config: Mapping[str, Any]) -> int | None:
    """How many layers a config says that there are; None if it does not."""
    return next((value for key, value in config.items() if key in LAYER_FIELDS and isinstance(value, int)), None)


def count_layers_within(config: Mapping[str, Any]) -> int | None:
    """How many layers a config says that there are, itself or in what it holds; None if it does not."""
    inner = [config.get("text_config"), *(value for key, value in config.items() if not _OTHER_SENSES.match(key))]
    inside = (count_layers_within(value) for value in inner if isinstance(value, dict))
    return count_layers_of(config) or next((count for count in inside if count), None)


def with_defaults(config: Mapping[str, Any], arguments_of: Callable[[Mapping[str, Any]], type | None]) -> Config:
    """A config with the whole numbers that are defaults of its argument class, so that they are shrunk as well.

    Args:
        config: It and what it holds have them by their own model types.
        arguments_of: The argument class of a config; None if there is none.
    """
    given = {k: with_defaults(v, arguments_of) if isinstance(v, Mapping) else v for k, v in config.items()}
    arguments = arguments_of(config)
    known = LAYER_FIELDS if count_layers_within(config) else ()
    fields = dataclasses.fields(arguments) if arguments and dataclasses.is_dataclass(arguments) else ()
    defaults = {field.name: field.default for field in fields if type(field.default) is int}
    return {name: value for name, value in defaults.items() if name not in known} | given


def _shrunk(key: str, value: Any, config: Mapping[str, Any], real: int | None, kept: Sequence[int], first: int) -> Any:
    if isinstance(value, Mapping):
        return value if key in _ROTARY else shrunk(value, kept, config)
    if isinstance(value, str) and real == len(value) and "pattern" in key:
        return "".join(value[layer] for layer in kept)
    if isinstance(value, list) and real == len(value):
        return _for_layers(key, [value[layer] for layer in kept], config, kept)
    if isinstance(value, list) and real and key.endswith(("layers", "idx", "idxs")):
        return _renumbered(value, kept, first)
    if isinstance(value, bool) or not isinstance(value, int) or _PATTERN.fullmatch(key):
        return value
    if real and value and _SHARING.fullmatch(key):
        return min(max(1, round(value * len(kept) / real)), len(kept) - 1)
    heads = _heads_around(key, config)
    if heads is not None:
        return _tiny_part(value, heads)
    tiny = _tiny(key, value, len(kept))
    if key.endswith("head_dim") and isinstance(part := config.get("partial_rotary_factor"), float):
        tiny = next((width for width in range(tiny, value, 8) if int(width * part) % 2 == 0), value)
    return value if not isinstance(tiny, int) else min(tiny, value)


def _renumbered(numbers: Sequence[Any], kept: Sequence[int], first: int) -> list[Any]:
    """A list of layer numbers; those that count from the end, and what is no number, stay."""
    places = {layer + first: place + first for place, layer in enumerate(kept)}
    found = [places.get(entry) if isinstance(entry, int) and entry >= 0 else entry for entry in numbers]
    return [entry for entry, before in zip(found, numbers, strict=True) if entry is not None or before is None]


def _first_number(config: Mapping[str, Any], real: int | None) -> int:
    """What its lists of layer numbers count from: one where they name a layer so many, else zero."""
    lists = [value for key, value in config.items() if key.endswith("layers") and isinstance(value, list)]
    return int(any(real in numbers for numbers in lists))


def _for_layers(key: str, values: Any, config: Mapping[str, Any], kept: Sequence[int]) -> Any:
    """What a list says of each layer that is left: sizes are as many times the largest as they were."""
    if all(isinstance(value, Mapping) for value in values):
        return [shrunk(value, kept, config) for value in values]
    most = _tiny(key, None, len(kept))
    if "head" in key or not isinstance(most, int) or not all(type(value) is int for value in values):
        return values
    largest, unit = max([1, *values]), 32 if most > 32 else 1
    return [min(value, max(unit, round(most * value / largest / unit) * unit)) for value in values]


def _rotated(config: Mapping[str, Any]) -> float | None:
    """A width that the rotary embedding's is a fixed part of; None if it is not known."""
    width = config.get("qk_rope_head_dim") or config.get("head_dim")
    hidden, heads = config.get("hidden_size"), next((config[name] for name in _HEADS if config.get(name)), None)
    return width or (hidden / heads if hidden and heads else None)


def _with_factors(scaling: Any, ratio: float, name: str = "") -> Any:
    """A rotary embedding's scaling, with the factors for each of its frequencies thinned out."""
    if isinstance(scaling, Mapping):
        return {key: _with_factors(value, ratio, key) for key, value in scaling.items()}
    if not isinstance(scaling, list) or not name.endswith("_factor"):
        return scaling
    count = round(len(scaling) * ratio)
    return [scaling[i * len(scaling) // count] for i in range(count)]


def _heads_around(key: str, config: Mapping[str, Any]) -> int | None:
    """The number of heads that a field divides; None if it divides none, or none is known."""
    names = next((names for pattern, names in _PARTS_OF_HEADS if re.fullmatch(pattern, key)), ())
    return next((config[name] for name in names if isinstance(config.get(name), int)), None)


def _tiny_part(part: int, heads: int) -> int:
    """One, some or all of the heads, as it was: of 32 and 32, 32 and 8, 32 and 1 are left 4 and 4, 4 and 2, 4 and 1."""
    return min(heads, 4) if part == heads else min(part, 2)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else dataclasses.MISSING


def _tiny(name: str, default: Any, num_layers: int) -> Any:
    """The tiny value of a size; of anything else its default."""
    for pattern, size in _SIZES:
        if re.fullmatch(pattern, name):
            if size is None or isinstance(default, list | dict | str | bool | tuple):
                return default if default is not dataclasses.MISSING else size
            return num_layers if size == "layers" else size
    return default


def _invented(field: dataclasses.Field[Any], module: ModuleType, num_layers: int) -> Any:
    """A value for a field that has no default, by its name and type."""
    kind = str(field.type)
    for pattern, value in _DEFAULTS:
        if re.fullmatch(pattern, field.name):
            return [value] * num_layers if "List" in kind else value
    return _by_type(field.name, kind, module, num_layers)


def _by_type(name: str, kind: str, module: ModuleType, num_layers: int) -> Any:
    if "Dict" in kind:
        return None
    if "List" in kind or "list" in kind:
        return _list(name, kind, module, num_layers)
    for word, value in (("bool", False), ("float", 1.0), ("int", 2), ("str", "")):
        if word in kind:
            return value
    return dataclasses.MISSING


def _list(name: str, kind: str, module: ModuleType, num_layers: int) -> list[Any]:
    if "str" in kind:
        words = layer_words(module)
        return [words[i % len(words)] for i in range(num_layers)] if words else []
    if "bool" in kind:
        return [i % 2 == 1 for i in range(num_layers)]
    if name == "mlp_only_layers":
        return []
    return [i % 2 for i in range(num_layers)]


def argument_classes(module: ModuleType) -> list[type]:
    """Argument classes of language models that a module defines, or that it can reach in others."""
    homes = dict.fromkeys([module.__name__, *(base.__module__ for base in module.Model.__mro__)])
    homes |= dict.fromkeys(inner.__name__ for _, inner in inspect.getmembers(module, inspect.ismodule))
    found = dict[type, None]()
    for home in (sys.modules[name] for name in homes if name.startswith("mlx_lm.models.") or name == module.__name__):
        classes = [c for _, c in inspect.getmembers(home, inspect.isclass) if dataclasses.is_dataclass(c)]
        found |= dict.fromkeys(sorted(classes, key=lambda c: c.__module__ != home.__name__))
    return [c for c in found if {"vocab_size", "hidden_size"} <= {field.name for field in dataclasses.fields(c)}]
