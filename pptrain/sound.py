"""Refuse a config of which no model can be made, or that shrinking spoils; nothing of a model is computed."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from pptrain.compiling import EVALUATED, compiling
from pptrain.errors import ConfigError
from pptrain.invent import TINY, count_parameters
from pptrain.microbatch import kept_random_state
from pptrain.model import find_slots
from pptrain.shrink import LAYER_FIELDS
from pptrain.trace import SAMPLE

Make = Callable[[], nn.Module]


def refuse_broken(name: str, real: Make, made_up: Make | None) -> None:
    """Refuse a config whose own sizes, not yet shrunk, make no model.

    Args:
        name: Of the target.
        real: Makes the model of its real sizes.
        made_up: Makes one of the same module with made-up values: if that cannot be run either, the module is what
            fails, which is a verdict. None for a class of a user's own, which has to be made and may fail to run.

    Raises:
        ConfigError: If it cannot be made, or run where the made-up one can.
    """
    error = _fault_of(real, is_run=made_up is not None)
    if error is None or EVALUATED in str(error) or (made_up and _fault_of(made_up) is not None):
        return
    raise ConfigError(
        f"[target] {name} makes no model: with the sizes of its config it raises {_named(error)}. Expected values that "
        f"fit each other{', as those do that its model type is tried with' if made_up else ''}. Correct the config."
    ) from error


def refuse_misread(name: str, make: Make, num_layers: int, said: int | None) -> None:
    """Refuse a tiny model that is none, where its config gives sizes by names that are not known.

    Args:
        name: Of the target.
        make: Makes the tiny model.
        num_layers: How many it is to have.
        said: How many the config says that there are; None if it does not.

    Raises:
        ConfigError: If it has another number of layers or is large.
    """
    try:
        with kept_random_state():
            model = make()
            found, size = len(getattr(model, "layers", None) or []), count_parameters(model)
    except Exception:
        return  # A model's own code may raise anything, and will again, where that is looked at.
    if found and found != num_layers:
        raise ConfigError(
            f"[target] {name} has {found} layers where {num_layers} were asked for: its config says "
            f"{said or 'by no known name how many'}. Expected one of {', '.join(LAYER_FIELDS)}, lists by layer as "
            "long, and no more asked for than there are. Correct it, or try the config as it is with --full-size."
        )
    if size > TINY:
        raise ConfigError(
            f"[target] {name} shrunk to {num_layers} layers has {size} parameters; the largest is "
            f"{_largest_of(model)}. Expected at most {TINY}: its config has sizes by names that are not known. "
            "Give these small values, or try the config as it is with --full-size."
        )


def refuse_misshapen(name: str, make: Make, real: Make) -> None:
    """Refuse a tiny model that fails where one of the real sizes does not.

    Raises:
        ConfigError: If shrinking made what the model cannot be made or run with.
    """
    error = _fault_of(make)
    if error is not None and _fault_of(real) is None:
        raise ConfigError(
            f"[target] {name} cannot be shrunk: with small sizes it raises {_named(error)}; with those of its config "
            "it does not. Expected sizes by names that are known and that may be small. Give a config whose sizes are "
            "small themselves, and --full-size."
        ) from error


def _fault_of(make: Make, is_run: bool = True) -> Exception | None:
    """What is raised where a model is made, and given tokens, which is built and not evaluated."""
    try:
        with kept_random_state(), compiling():
            model = make()
            if is_run:
                mx.compile(model.__call__)(mx.zeros(SAMPLE, mx.int32))
    except Exception as error:
        return error  # a model's own code may raise anything
    return None


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).rstrip('.')}"


def _largest_of(model: nn.Module) -> str:
    """A model's largest parameter: its name and its shape."""
    name, slot = max(find_slots(model).items(), key=lambda item: item[1].array.size)
    return f"{name} {slot.array.shape}"
