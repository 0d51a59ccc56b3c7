"""An mlx-lm model as pptrain sees it: a stack of layers that can be intercepted, and parameters that have names.

Nothing here knows an architecture by name. A model is any `mlx.nn.Module` that takes tokens and returns logits, and
whose `layers` are called once each, in order, with the hidden state as their first argument.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from pptrain.errors import ModelError

Call = Callable[[mx.array], Any]
Around = Callable[[int, Call, mx.array], Any]
"""`around(layer, call, hidden)` stands in for a layer's own call, which `call(hidden)` makes."""


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
    """The model's layers in forward order.

    Raises:
        ModelError: If the model has no `layers`.
    """
    layers = getattr(model, "layers", None)
    if not layers:
        raise ModelError(
            f"[model] {type(model).__module__}.{type(model).__name__} has no `layers`. Expected the layer stack of an "
            "mlx-lm model. Give the model a property `layers` that returns its layers in forward order."
        )
    return list(layers)


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
    kinds = nn.Dropout | nn.Dropout2d | nn.Dropout3d
    return any(isinstance(m, kinds) and m.training and getattr(m, "_p_1", 1) != 1 for m in model.modules())


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


@contextmanager
def intercepted(layers: Sequence[nn.Module], around: Around) -> Generator[None]:
    """Let `around` stand in for each layer's call for a while.

    Each layer gets a subclass of its own class, so that attributes, `isinstance` and `super()` go on working, and gets
    its own class back at the end.
    """
    index = {id(layer): i for i, layer in enumerate(layers)}
    classes = [type(layer) for layer in layers]
    stand_ins = {cls: _stand_in(cls, index, around) for cls in set(classes)}
    try:
        for layer, cls in zip(layers, classes, strict=True):
            layer.__class__ = stand_ins[cls]
        yield
    finally:
        for layer, cls in zip(layers, classes, strict=True):
            layer.__class__ = cls


def _stand_in(cls: type[nn.Module], index: dict[int, int], around: Around) -> type[nn.Module]:
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if args:
            hidden, call = args[0], lambda h: cls.__call__(self, h, *args[1:], **kwargs)
        else:
            name = next(iter(kwargs), "")
            hidden, call = kwargs.get(name), lambda h: cls.__call__(self, **{**kwargs, name: h})
        return around(index[id(self)], call, hidden)  # type: ignore[arg-type]

    return type(cls.__name__, (cls,), {"__call__": __call__, "__module__": cls.__module__})


@dataclass(frozen=True, slots=True)
class Trace:
    """What one lazy forward shows about a model, without reading a weight.

    A *site* is a part of the forward between two neighbouring layer inputs: site 0 is everything before the first layer
    (the embedding), site i + 1 is layer i with whatever follows it until the next layer's input; the last site ends at
    the logits.
    """

    boundaries: tuple[Specs, ...]
    """What enters each layer: `boundaries[i]` is the input of layer i."""
    uses: tuple[frozenset[str], ...]
    """Names of the parameters that each site reads."""


def trace(model: nn.Module, tokens: mx.array) -> Trace:
    """Find the boundaries and who reads which parameter, by building the forward once and evaluating nothing.

    Args:
        model: Any mlx-lm model; its weights may be lazy and stay so.
        tokens: `[microbatch_size, seq]`.

    Raises:
        ModelError: If the layers are not called once each, in order, with one hidden state.
    """
    *inputs, logits = _ends(model, tokens)
    return Trace(_specs(inputs), _uses(model, find_layers(model), [*inputs, logits]))


def boundaries(model: nn.Module, tokens: mx.array) -> tuple[Specs, ...]:
    """What enters each layer for tokens of another shape; raises as `trace` does."""
    return _specs(_ends(model, tokens)[:-1])


def _specs(inputs: Sequence[mx.array]) -> tuple[Specs, ...]:
    return tuple((ArraySpec.of(hidden),) for hidden in inputs)


def _ends(model: nn.Module, tokens: mx.array) -> list[mx.array]:
    """The unevaluated end of each site."""
    layers, inputs = find_layers(model), list[mx.array]()

    def around(layer: int, call: Call, hidden: Any) -> Any:
        if layer != len(inputs) or not isinstance(hidden, mx.array):
            raise ModelError(_not_one_hidden_state(model, layer, len(inputs), hidden))
        inputs.append(hidden)
        # A fresh array cuts the graph here, so that each site can be looked at by itself.
        return call(mx.zeros(hidden.shape, hidden.dtype))

    with intercepted(layers, around):
        logits = model(tokens)
    if len(inputs) != len(layers) or not isinstance(logits, mx.array):
        raise ModelError(_not_one_hidden_state(model, len(inputs), len(layers), logits))
    return [*inputs, logits]


def _not_one_hidden_state(model: nn.Module, layer: int, expected: int, value: object) -> str:
    return (
        f"[model] {type(model).__module__} cannot be cut: layer {layer} came where layer {expected} was expected, with "
        f"{type(value).__name__} as its hidden state. Expected every layer to be called once, in order, with one "
        "array. Train this model on one device with mlx_lm.lora."
    )


def _uses(model: nn.Module, layers: Sequence[nn.Module], ends: Sequence[mx.array]) -> tuple[frozenset[str], ...]:
    """Names of the parameters from which each end can be reached in the lazy graph."""
    arrays = dict(tree_flatten(model.parameters()))
    of_layer = [{id(a) for _, a in tree_flatten(layer.parameters())} for layer in layers]
    in_layers = set[int]().union(*of_layer)
    outside = [name for name, a in arrays.items() if id(a) not in in_layers]

    def candidates(site: int) -> list[str]:
        own = of_layer[site - 1] if site else set[int]()
        return outside + [name for name, a in arrays.items() if id(a) in own]

    return tuple(reachable(end, {name: arrays[name] for name in candidates(site)}) for site, end in enumerate(ends))


def reachable(end: mx.array, leaves: dict[str, mx.array]) -> frozenset[str]:
    """Which of the leaves an unevaluated array is computed from."""
    picture = io.StringIO()
    mx.export_to_dot(picture, end, **leaves)
    # Lines of the form `"name" -> 1234`: the array is an input of a primitive. Names made by MLX have no dot in them.
    sources = set(re.findall(r'^"(.+)" -> \d+$', picture.getvalue(), re.MULTILINE))
    return frozenset(name for name in leaves if name in sources)


def unmatched_keys(layers: Iterable[nn.Module], keys: Iterable[str]) -> list[str]:
    """LoRA keys that name no module of any layer."""
    known = {name for layer in layers for name, _ in layer.named_modules()}
    return [key for key in keys if key not in known]
