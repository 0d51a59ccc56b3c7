"""An mlx-lm model as pptrain sees it: a stack of layers that can be intercepted, and parameters that have names.

Nothing here knows an architecture by name. A model is any `mlx.nn.Module` that takes tokens and returns logits, and
that has `layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from pptrain.errors import ModelError

Around = Callable[..., Any]
"""`around(number, call, *args, **kwargs)` stands in for a module's own call, which `call(*args, **kwargs)` makes."""


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Shape and dtype of an array that need not exist yet."""

    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        size = self.dtype.size
        for n in self.shape:
            size *= n
        return size

    @staticmethod
    def of(array: mx.array) -> ArraySpec:
        """The spec of an array; a lazy one stays lazy."""
        return ArraySpec(tuple(array.shape), array.dtype)


Boundary = list[mx.array]
"""What crosses between stages going forward, and the list of their cotangents going backward."""

Specs = tuple[ArraySpec, ...]
"""The arrays of one boundary."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a parameter lives, so that it can be read and replaced without walking the model."""

    container: Any
    key: Any

    @property
    def array(self) -> mx.array:
        """The parameter as it is now."""
        return self.container[self.key]

    def put(self, array: mx.array) -> None:
        """Replace the parameter."""
        self.container[self.key] = array


def find_layers(model: nn.Module) -> list[nn.Module]:
    """The model's layers in forward order: of a list, a dict, or an `nn.Sequential`.

    Raises:
        ModelError: If the model has no `layers`, or they are no modules.
    """
    layers: Any = getattr(model, "layers", None)
    if isinstance(layers, nn.Sequential):
        layers = layers.layers
    found: list[Any] = list(layers.values() if isinstance(layers, dict) else layers or ())
    if not found:
        raise ModelError(
            f"[model] {type(model).__module__}.{type(model).__name__} has no `layers`. Expected the layer stack of an "
            "mlx-lm model. Give the model a property `layers` that returns its layers in forward order."
        )
    if wrong := [number for number, layer in enumerate(found) if not isinstance(layer, nn.Module)]:
        raise ModelError(
            f"[model] {type(model).__module__}.{type(model).__name__} has a {type(found[wrong[0]]).__name__} as layer "
            f"{wrong[0]}. Expected modules of mlx.nn, whose calls can be intercepted. Make it one."
        )
    return found


def find_slots(model: nn.Module) -> dict[str, Slot]:
    """Every parameter of the whole model by name, in tree order."""

    def slot(name: str) -> Slot:
        *path, last = name.split(".")
        container: Any = model
        for part in path:
            container = container[int(part)] if isinstance(container, list | tuple) else container[part]
        return Slot(container, int(last) if isinstance(container, list) else last)

    return {name: slot(name) for name, _ in tree_flatten(model.parameters())}


def trainable_names(model: nn.Module) -> tuple[str, ...]:
    """Names of the parameters that train, in tree order: the order in which the global norm is summed."""
    return tuple(name for name, _ in tree_flatten(model.trainable_parameters()))


def has_dropout(model: nn.Module) -> bool:
    """Whether a forward of this model draws random masks now."""
    return any(map(_draws, model.modules()))


def _draws(module: nn.Module) -> bool:
    kinds = nn.Dropout | nn.Dropout2d | nn.Dropout3d
    return isinstance(module, kinds) and module.training and getattr(module, "_p_1", 1) != 1


@contextmanager
def replaced(slots: Sequence[Slot], arrays: Sequence[mx.array]) -> Generator[None]:
    """Put other arrays into the slots for a while."""
    saved = [slot.array for slot in slots]
    try:
        for slot, array in zip(slots, arrays, strict=True):
            slot.put(array)
        yield
    finally:
        for slot, array in zip(slots, saved, strict=True):
            slot.put(array)


@dataclass(frozen=True, slots=True)
class Unit:
    """A module whose calls are intercepted: a layer, a part of one that is itself never called, or what is between."""

    layer: int | None
    """None for what the model calls between its layers."""
    module: nn.Module
    is_whole: bool

    @property
    def name(self) -> str:
        """What errors call it."""
        return f"a {type(self.module).__name__} between layers" if self.layer is None else f"layer {self.layer}"


def units_of(model: nn.Module) -> Generator[list[Unit]]:
    """What to intercept: the layers; where the model calls none of them but their parts, those."""
    layers = find_layers(model)
    yield _once(Unit(number, layer, True) for number, layer in enumerate(layers))
    yield _once(Unit(number, part, False) for number, layer in enumerate(layers) for part in layer.modules())


def with_those_between(model: nn.Module, units: Iterable[Unit]) -> list[Unit]:
    """Also each module that the model may call between its layers: any that holds none of them."""
    layers = {id(layer) for layer in find_layers(model)}
    between = [m for m in model.modules() if layers.isdisjoint(id(part) for part in m.modules())]
    return _once([*units, *(Unit(None, module, True) for module in between)])


def _once(units: Iterable[Unit]) -> list[Unit]:
    """Each module once, as a part of the first layer that has it."""
    found = dict[int, Unit]()
    for unit in units:
        found.setdefault(id(unit.module), unit)
    return list(found.values())


@contextmanager
def intercepted(modules: Sequence[nn.Module], around: Around) -> Generator[None]:
    """Let `around` stand in for each module's call for a while; calls within such a call are the module's own.

    Each module gets a subclass of its own class, so that attributes, `isinstance` and `super()` go on working, and gets
    its own class back at the end.
    """
    index = dict[int, int]()
    for number, module in enumerate(modules):
        index.setdefault(id(module), number)
    classes, outermost = [type(module) for module in modules], _Outermost(index, around)
    stand_ins = {cls: _stand_in(cls, outermost) for cls in set(classes)}
    try:
        for module, cls in zip(modules, classes, strict=True):
            module.__class__ = stand_ins[cls]
        yield
    finally:
        for module, cls in zip(modules, classes, strict=True):
            module.__class__ = cls


class _Outermost:
    """Hands a call to `around` unless it comes from within one."""

    def __init__(self, index: dict[int, int], around: Around) -> None:
        self._index, self._around = index, around
        self._is_inside = False

    def __call__(self, module: nn.Module, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self._is_inside:
            return call(*args, **kwargs)
        self._is_inside = True
        try:
            return self._around(self._index[id(module)], call, *args, **kwargs)
        finally:
            self._is_inside = False


def _stand_in(cls: type[nn.Module], outermost: _Outermost) -> type[nn.Module]:
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return outermost(self, lambda *a, **k: cls.__call__(self, *a, **k), *args, **kwargs)  # type: ignore[operator]

    return type(cls.__name__, (cls,), {"__call__": __call__, "__module__": cls.__module__})


def unmatched_keys(layers: Iterable[nn.Module], keys: Iterable[str]) -> list[str]:
    """LoRA keys that name no module of any layer."""
    known = {name for layer in layers for name, _ in layer.named_modules()}
    return [key for key in keys if key not in known]
