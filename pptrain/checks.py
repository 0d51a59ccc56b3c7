"""What the value of a configuration's key must satisfy, and the errors that say so.

`check` is for any key, by its type and bounds; the others are for keys of mlx_lm.lora that are mappings, whose mistakes
would otherwise be silent (a LoRA key that matches nothing) or a traceback from the depths of MLX.
"""

import inspect
import math
import operator
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import mlx.optimizers as optim
import mlx.optimizers.schedulers as schedulers
from mlx_lm.lora import CONFIG_DEFAULTS
from mlx_lm.tuner.callbacks import SUPPORT_CALLBACK
from mlx_lm.tuner.utils import build_schedule

from pptrain.errors import ConfigError

_NOUNS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    dict: "a mapping",
    list: "a list of mappings",
    tuple: "a whole number of at least 1 for each stage, such as 10,8,8",
}
_BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "at_least": ("of at least", operator.ge),
    "above": ("above", operator.gt),
    "below": ("below", operator.lt),
}
_MLX_LM: dict[str, Any] = CONFIG_DEFAULTS
_LORA_BOUNDS = {
    "rank": (int, {"at_least": 1}),
    "scale": (float, {}),
    "dropout": (float, {"at_least": 0, "below": 1}),
}


def check(where: str, value: Any, hint: Any, limits: Mapping[str, Any]) -> None:
    """Refuse a value of the wrong type, or that is none of the choices, or is out of bounds.

    Args:
        where: The flag or key, as the user wrote it.
        value: What it was given.
        hint: The key's annotation.
        limits: Any of `choices`, `at_least`, `above`, `below`.
    """
    known = choices(hint, limits)
    if known and value not in known:
        raise ConfigError(f"{where} is {value!r}. Expected one of {', '.join(known)}.{nearest(str(value), known)}")
    if not is_of(value, hint) or not _is_within(value, limits):
        raise ConfigError(f"{where} is {value!r}. Expected {_expected(hint, limits)}.")


def choices(hint: Any, limits: Mapping[str, Any]) -> tuple[str, ...]:
    """The values that a key can have, where they can be counted."""
    return get_args(hint) if get_origin(hint) is Literal else tuple(limits.get("choices", ()))


def is_of(value: Any, hint: Any) -> bool:
    """Whether a value is of a key's type; an int will do for a float, and True is no int."""
    if get_origin(hint) is Literal:
        return type(value) is str and value in get_args(hint)
    if get_origin(hint) is tuple:
        return type(value) is tuple and len(value) > 0 and all(type(part) is int and part >= 1 for part in value)
    if get_origin(hint) is list:
        return type(value) is list and all(is_of(part, get_args(hint)[0]) for part in value)
    if get_origin(hint) is dict:
        return type(value) is dict
    if get_args(hint):
        return any(is_of(value, one) for one in get_args(hint))
    return type(value) in (int, float) if hint is float else type(value) is hint


def nearest(name: str, known: Collection[str]) -> str:
    """` Did you mean …?`, or nothing where nothing is near."""
    matches = get_close_matches(name, known, n=1, cutoff=0.5)
    return f" Did you mean {matches[0]}?" if matches else ""


def _is_within(value: Any, limits: Mapping[str, Any]) -> bool:
    if type(value) not in (int, float):
        return True
    return math.isfinite(value) and all(
        holds(value, limits[name]) for name, (_, holds) in _BOUNDS.items() if name in limits
    )


def _expected(hint: Any, limits: Mapping[str, Any]) -> str:
    kinds = [hint] if hint in _NOUNS or get_origin(hint) in _NOUNS else get_args(hint)
    nouns = " or ".join(_noun(kind) for kind in kinds if kind is not NoneType)
    return nouns + " and".join(f" {words} {limits[name]}" for name, (words, _) in _BOUNDS.items() if name in limits)


def _noun(kind: Any) -> str:
    return " or ".join(get_args(kind)) if get_origin(kind) is Literal else _NOUNS[get_origin(kind) or kind]


def _check_names(where: str, given: Collection[Any], known: Collection[str]) -> None:
    for name in given:
        if name not in known:
            raise ConfigError(f"{where} has no key {name!r}.{nearest(str(name), known)} It takes {', '.join(known)}.")


def check_optimizers(configs: Mapping[str, Any]) -> None:
    """Each optimizer's arguments must be ones that MLX's class takes."""
    classes = {name.lower(): kind for name, kind in vars(optim).items() if inspect.isclass(kind)}
    _check_names("optimizer_config", configs, _MLX_LM["optimizer_config"])
    for name, arguments in configs.items():
        check(f"optimizer_config: {name}", arguments, dict[str, Any], {})
        known = [key for key in inspect.signature(classes[name]).parameters if key != "learning_rate"]
        _check_names(f"optimizer_config: {name}", arguments, known)


def check_lora(parameters: Mapping[str, Any]) -> None:
    """As mlx-lm's `linear_to_lora_layers` takes them: a file replaces all of its defaults, and may add `keys`."""
    required = _MLX_LM["lora_parameters"]
    _check_names("lora_parameters", parameters, [*required, "keys"])
    if missing := [name for name in required if name not in parameters]:
        raise ConfigError(f"lora_parameters has no {', '.join(missing)}. It needs {', '.join(required)}.")
    for name, (kind, limits) in _LORA_BOUNDS.items():
        check(f"lora_parameters: {name}", parameters[name], kind, limits)
    keys = parameters.get("keys")
    if keys is not None and not (is_of(keys, list[str]) and keys):
        raise ConfigError(f"lora_parameters: keys is {keys!r}. Expected a list of names, such as self_attn.q_proj.")


def check_learning_rate(schedule: Mapping[str, Any]) -> None:
    """The learning rate's schedule is built once by mlx-lm's own function, to see that it can be."""
    _check_names("lr_schedule", schedule, ["name", "arguments", "warmup", "warmup_init"])
    names = [name for name, kind in vars(schedulers).items() if inspect.isfunction(kind)]
    check("lr_schedule: name", schedule.get("name"), str, {"choices": names})
    try:
        build_schedule(dict(schedule))
    except (TypeError, ValueError, KeyError, IndexError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"lr_schedule is {schedule!r}, and MLX makes no schedule of it ({reason}).") from error


def check_hub(sets: Mapping[str, Any] | list[dict[str, Any]], features: Collection[str], *, is_tested: bool) -> None:
    """Each hub data set must name its path, and its test split where a test was asked for."""
    known = ["path", "config", "train_split", "valid_split", "test_split", "mask_prompt", *features]
    for one in sets if isinstance(sets, list) else [sets]:
        _check_names("hf_dataset", one, known)
        for name in ["path", "test_split"] if is_tested else ["path"]:
            check(f"hf_dataset: {name}", one.get(name), str, {})


def check_services(services: str) -> None:
    """Every service that is reported to must be one that mlx-lm knows."""
    for service in services.split(","):
        name = service.strip().lower()
        if name and name not in SUPPORT_CALLBACK:
            known = ", ".join(SUPPORT_CALLBACK)
            raise ConfigError(f"report_to names {name!r}. Expected {known}, or both.{nearest(name, SUPPORT_CALLBACK)}")
