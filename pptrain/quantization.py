"""How a config says that a model is quantized, as mlx-lm reads it, and a model quantized so."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.convert import mixed_quant_predicate_builder
from mlx_lm.utils import _compressed_tensors_quantization  # pyright: ignore[reportPrivateUsage]

from pptrain.errors import ConfigError

Parameters = dict[str, Any]
"""What `to_quantized` takes: `group_size`, `bits` and `mode`."""

MODES: Mapping[str, Parameters] = {
    "affine": {"group_size": 32, "bits": 4, "mode": "affine"},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
}
"""What MLX has, in groups that fit into tiny widths."""

_GROUP_SIZES: Mapping[str, tuple[int, ...]] = {"affine": (64, 128, 32), "mxfp4": (32,), "mxfp8": (32,), "nvfp4": (16,)}
"""What MLX has for each mode, its default first."""

_KEYS = ("group_size", "bits", "mode")

_BITS: Mapping[str, tuple[int, ...]] = {"affine": (1, 2, 3, 4, 5, 6, 8), "mxfp4": (4,), "mxfp8": (8,), "nvfp4": (4,)}


@dataclass(frozen=True, slots=True)
class Quantization:
    """Which modules of a model are quantized, and how."""

    parameters: Parameters
    """Of each module that has none of its own."""
    modules: Mapping[str, Parameters | bool] = field(default_factory=dict[str, Parameters | bool])
    """By a module's path its own parameters, or whether it is quantized at all."""
    skipped: tuple[str, ...] = ()
    """Names or patterns of what other programs left as it was."""
    has_embeddings: bool = True
    """Whether embeddings are quantized, which only MLX does."""


def quantization_of(config: Mapping[str, Any]) -> Quantization | None:
    """What a config says, or what mlx-lm translates of other programs' `quantization_config`; None for weights as such.

    Raises:
        ConfigError: If MLX has no such bits, groups or mode, or the config does not say them.
        ValueError: If mlx-lm reads no such weights, or only to run them.
    """
    own, text = config.get("quantization"), config.get("text_config")
    other = config.get("quantization_config") or (isinstance(text, Mapping) and text.get("quantization_config"))
    if own is not None:
        return _of_mlx("quantization", own)
    if not other:
        return None
    if not isinstance(other, Mapping) or "quant_method" not in other:
        return _of_mlx("quantization_config", other)
    parameters = _translated(other)
    if parameters is None:
        return None
    return Quantization(parameters, skipped=_skipped(other), has_embeddings=False)


def _of_mlx(where: str, said: Any) -> Quantization:
    """What MLX's own key says: numbers for the whole model, and by their paths modules that differ."""
    _refuse_unknown(where, said, ("group_size", "bits"))
    modules = {path: value for path, value in said.items() if isinstance(value, bool | dict) or "." in path}
    for path, value in modules.items():
        if not isinstance(value, bool):
            _refuse_unknown(f"{where} of {path}", value, ())
    return Quantization({"mode": "affine", **{key: said[key] for key in _KEYS if key in said}}, modules)


def _refuse_unknown(where: str, said: Any, needed: Sequence[str]) -> None:
    mode = said.get("mode", "affine") if isinstance(said, Mapping) else None
    known = {"group_size": _GROUP_SIZES.get(mode, ()), "bits": _BITS.get(mode, ())} if isinstance(mode, str) else {}
    if known and all(_is_one_of(said[key], known[key]) if key in said else key not in needed for key in known):
        return
    whole = {k: v for k, v in said.items() if not isinstance(v, bool | dict)} if isinstance(said, Mapping) else said
    kinds = (f"{kind}: groups of {_any_of(_GROUP_SIZES[kind])}, bits {_any_of(_BITS[kind])}" for kind in MODES)
    raise ConfigError(
        f"[quantization] The config's {where} is {whole!r}. Expected a group_size, bits and, if not affine, a mode "
        f"that MLX has ({'; '.join(kinds)}). Take the config from the model as it was converted."
    )


def _is_one_of(value: Any, numbers: Sequence[int]) -> bool:
    return type(value) is int and value in numbers  # to Python True is 1 and 4.0 is 4, which MLX does not take


def _any_of(numbers: Sequence[int]) -> str:
    return "|".join(map(str, sorted(numbers)))


def _translated(other: Mapping[str, Any]) -> Parameters | None:
    """As `mlx_lm.utils.load_model` does; None where it takes the weights out of their packing."""
    method, settings = other["quant_method"], _settings(other)
    if method in ("mxfp4", "mxfp8"):
        return MODES[method]
    if method == "fp8":
        is_packed = other.get("scale_fmt") == "ue8m0" and other.get("weight_block_size") == [32, 32]
        return MODES["mxfp8"] if is_packed else None
    if method == "compressed-tensors":
        return _compressed_tensors_quantization(dict(other))
    if method == "modelopt" and settings.get("quant_algo") == "NVFP4":
        return {**MODES["nvfp4"], "group_size": settings.get("group_size", 16)}
    group_size = other.get("group_size", 128)
    if method in ("awq", "gptq") and other.get("bits", 4) == 4 and group_size in _GROUP_SIZES["affine"]:
        return {**MODES["affine"], "group_size": group_size}
    kind = {key: settings[key] for key in ("quant_algo", "bits", "group_size") if key in settings}
    raise ValueError(
        f"its quantization_config is of {method} {kind or ''}, which mlx-lm does not train on: expected awq or gptq of "
        "4 bits in groups of 32, 64 or 128, compressed-tensors, fp8, modelopt's NVFP4, mxfp4 or mxfp8"
    )


def _settings(other: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where the settings stand: modelopt has them one key deeper."""
    inner = other.get("quantization")
    return inner if isinstance(inner, Mapping) else other


def _skipped(other: Mapping[str, Any]) -> tuple[str, ...]:
    settings = _settings(other)
    said = [settings.get(key) or () for key in ("modules_to_not_convert", "ignore", "exclude_modules")]
    lists = [(names,) if isinstance(names, str) else names for names in said]
    head = ("lm_head",) if other["quant_method"] in ("awq", "gptq") and not other.get("lm_head") else ()
    return (*(str(name) for names in lists for name in names), *head)


def as_converted(model: nn.Module, parameters: Parameters, recipe: str | None = None) -> Quantization:
    """What `mlx_lm.convert` makes of a model: with a recipe, or else what the model itself wants for some modules.

    Raises:
        ValueError: If the recipe is not for this model: it needs modules of certain names.
    """
    predicate: Any = getattr(model, "quant_predicate", None)
    if recipe is not None:
        predicate = mixed_quant_predicate_builder(recipe, model, parameters["group_size"])
    if predicate is None:
        return Quantization(parameters)
    leaves = {path: module for path, module in _leaves(model).items() if hasattr(module, "to_quantized")}
    return Quantization(parameters, {path: predicate(path, module) for path, module in leaves.items()})


def quantize(model: nn.Module, quantization: Quantization) -> None:
    """Quantize a model's modules in place, as they are loaded from files of which the config says so.

    A width that is no multiple of its group size leaves a module as it is, as it does when mlx-lm converts a model.
    """
    wanted = _wanted(model, quantization)

    def predicate(path: str, module: nn.Module) -> bool | Parameters:
        parameters = wanted.get(path)
        return dict(parameters) if parameters and _fits(module, parameters["group_size"]) else False

    nn.quantize(model, class_predicate=predicate)


def fitted(model: nn.Module, quantization: Quantization) -> tuple[Quantization, list[str]]:
    """The same for a model whose widths are not those of which it was said: smaller groups, in the same bits and mode.

    Returns:
        The quantization, and in what it differs from what was said, one line for each kind of difference.
    """
    own, others = dict(quantization.modules), defaultdict[tuple[str, str], list[str]](list)
    modules = _leaves(model)
    for path, said in _wanted(model, quantization).items():
        group_size, wanted = _group_size(modules[path], said), said["group_size"]
        if group_size is None:
            own[path] = False
            others["no quantized", f"no group of {said.get('mode', 'affine')} divides"].append(path)
        elif group_size != wanted:
            own[path] = {**said, "group_size": group_size}
            others[f"groups of {group_size} instead of {wanted} in", f"{wanted} does not divide"].append(path)
    notes = [f"{what} {some(paths)}, whose tiny width {why}" for (what, why), paths in others.items()]
    return replace(quantization, modules=own), notes


def named_in_vain(model: nn.Module, quantization: Quantization) -> list[str]:
    """Modules of which something was said and that a model does not have; mlx-lm passes over them in silence."""
    return sorted(quantization.modules.keys() - _leaves(model).keys())


def some(paths: Sequence[str]) -> str:
    """The first of some paths, and how many more there are."""
    return f"{paths[0]} and {len(paths) - 1} more" if len(paths) > 1 else paths[0]


def _wanted(model: nn.Module, quantization: Quantization) -> dict[str, Parameters]:
    """The parameters of each module that is to be quantized, by its path; its width is not looked at."""
    allows = getattr(model, "quant_predicate", None) or (lambda _path, _module: True)
    wanted = dict[str, Parameters]()
    for path, module in _leaves(model).items():
        said = quantization.modules.get(path)
        if said is None:
            said = hasattr(module, "to_quantized") and not _is_skipped(path, module, quantization)
            said = said and bool(allows(path, module))
        if said is not False:
            wanted[path] = quantization.parameters if said is True else _complete(said)
    return wanted


def _is_skipped(path: str, module: nn.Module, quantization: Quantization) -> bool:
    if isinstance(module, nn.Embedding) and not quantization.has_embeddings:
        return True
    return any(_matches(pattern, path) for pattern in quantization.skipped)


def _matches(pattern: str, path: str) -> bool:
    """Whether a name, which may have stars and stand for all within it, or a regular expression is a path's."""
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), path) is not None
    name = ".*".join(re.escape(part) for part in pattern.strip(".").split("*"))
    return re.search(rf"(^|\.){name}(\.|$)", path) is not None


def _complete(parameters: Parameters) -> Parameters:
    """With the mode's group size, where only `to_quantized` knows it."""
    sizes = _GROUP_SIZES[parameters.get("mode", "affine")]
    return {**parameters, "group_size": parameters.get("group_size") or sizes[0]}


def _group_size(module: nn.Module, said: Parameters) -> int | None:
    """The size nearest below what was said that divides the width; None if none does."""
    sizes = sorted(_GROUP_SIZES[said.get("mode", "affine")], reverse=True)
    return next((size for size in sizes if size <= said["group_size"] and _fits(module, size)), None)


def _fits(module: nn.Module, group_size: int) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, mx.array) and weight.shape[-1] % group_size == 0


def _leaves(model: nn.Module) -> dict[str, nn.Module]:
    leaves: Any = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
    return dict(leaves)
