"""What one lazy forward shows about a model: where it can be cut, and what would cross each cut.

The forward runs once with recording layers and evaluates nothing. Every array that a layer is given or hands on becomes
a *value*: a fresh array takes its place, so that the graph between two values can be looked at by itself. What a
value is computed from, other values and parameters, follows from that graph, however it got there: as an argument, in
a tuple, through a dict that layers fill, or by a variable of the model's own forward. Arrays that depend on no
parameter (masks, positions) are no values: whoever needs them computes them from the tokens.

Where what the model makes between its layers would be made again on both sides of a cut, the forward runs once more,
and what is made by modules between layers becomes values, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from pptrain.errors import ModelError
from pptrain.lazy import handle, is_stopped, mentions, overwritten, picture_of
from pptrain.model import (
    ArraySpec,
    Unit,
    find_layers,
    find_slots,
    intercepted,
    replaced,
    units_of,
    with_those_between,
)
from pptrain.structure import Outcome, arrays_in, containers_in, effects, snapshot
from pptrain.values import Call, Given, Made, Mentions, Trace, Value

SAMPLE = (1, 8)
"""Shape of the tokens with which a model is looked at first."""


def trace(model: nn.Module, tokens: mx.array, is_trained: bool = True) -> Trace:
    """Build the forward once, evaluating nothing, and see what is made and used where.

    Args:
        model: Any mlx-lm model; its weights may be lazy and stay so.
        tokens: `[microbatch_size, seq]`.
        is_trained: Whether there will be gradients; if not, layers may keep what they make of their weights.

    Raises:
        ModelError: If the model cannot be cut: no layer is called, or one changes what it must not.
    """
    slots = list(find_slots(model).values())
    with replaced(slots, [slot.array for slot in slots]):  # a forward may put another array in a parameter's place
        found = _trace_twice(model, tokens, units_of(model), is_trained)
        if not found.made_between:
            return found
        closer = _trace_twice(model, tokens, [with_those_between(model, found.units)], is_trained)
        # Not where a module calls layers that it does not hold, which would not be seen within its call.
        return closer if closer.num_positions == found.num_positions else found


def _trace_twice(model: nn.Module, tokens: mx.array, choices: Iterable[list[Unit]], is_trained: bool) -> Trace:
    """Trace, and again where a layer has changed what it holds: what one call makes, none after it may read."""
    layers = find_layers(model)
    before = _attributes(layers)
    found = _trace(model, tokens, choices)
    if changed := _changed(before, after := _attributes(layers)):
        # What is made at the first call may be kept, and what each call makes anew.
        kept = {key: after[key] for key in changed if _is_array(after[key])}
        found = _trace(model, tokens, [list(found.units)], kept if is_trained else None)
        again = [key for key in _changed(after, _attributes(layers)) if key not in kept]
        _refuse_state(model, layers, again)
    return found


def count_layers(model: nn.Module) -> int:
    """Layers that a cut may divide, counted as often as the forward passes through them."""
    for units in units_of(model):
        counter = _Counter(units)
        with intercepted([unit.module for unit in units], counter.around):
            model(mx.zeros(SAMPLE, mx.int32))
        if counter.num_positions:
            return counter.num_positions
    return len(find_layers(model))


class _Counter:
    """Numbers the layers in the order in which the forward passes through them."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.num_positions = 0
        self._units = units
        self._last: Unit | None = None

    def pass_through(self, number: int) -> bool:
        """Count a call of a unit; returns whether it is the first of its position."""
        unit, last = self._units[number], self._last
        self._last = unit
        is_first = last is None or unit.layer != last.layer or unit.is_whole
        self.num_positions += is_first
        return is_first

    def around(self, number: int, call: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.pass_through(number)
        return call(*args, **kwargs)


def _trace(model: nn.Module, tokens: mx.array, choices: Iterable[list[Unit]], kept: Attributes | None = None) -> Trace:
    """What one forward shows, with the first of the choices of units that it calls."""
    for units in choices:
        recorder = _Recorder(model, units, kept or {})
        with intercepted([unit.module for unit in units], recorder.around):
            logits = model(tokens)
        if recorder.calls:
            return recorder.finish(logits)
    raise ModelError(
        f"[model] {type(model).__module__} cannot be cut: none of its layers is called in a forward. Expected a "
        "forward that calls `model.layers`. Train this model on one device with mlx_lm.lora."
    )


_VALUE, _MADE, _KEPT = "value:", "made:", "kept:"
"""Start the names of values, of values before fresh arrays took their place, and of what a call before has left behind;
no parameter's name has a colon.
"""


class _Recorder:
    """Stands in for every layer's call, and writes down what it was given and what came of it."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], kept: Attributes) -> None:
        self.calls, self.values = list[Call](), list[Value]()
        self._model, self._units, self._counter = model, units, _Counter(units)
        parameters = dict(tree_flatten(model.parameters()))
        self._names = {id(array): name for name, array in parameters.items()}
        # One array may have several names; like `nn.Module.update`, the last one counts.
        self._leaves = {name: parameters[name] for name in self._names.values()}
        self._kept = {f"{_KEPT}{number}": key for number, key in enumerate(kept)}
        self._leaves |= {name: kept[key] for name, key in self._kept.items()}
        self._owners = _owners(find_layers(model))
        self._held = {id(a) for m in model.modules() for a in [*m.values(), *vars(m).values()] if _is_array(a)}
        self._number = dict[int, int]()
        self._from_tokens = set[int]()
        self._alive = list[mx.array]()  # so that no id comes twice
        self._early = dict[int, mx.array]()  # what was made before the first layer, as it was made
        self._changed = dict[int, int]()  # by value, the layer that changed it in place
        self.strangers = list[tuple[int, int, str]]()

    def around(self, number: int, call: Any, /, *args: Any, **kwargs: Any) -> Any:
        layer = self._units[number].layer
        if layer is None:
            return self._between(call, *args, **kwargs)
        is_first = self._counter.pass_through(number)
        position, leaves = self._counter.num_positions - 1, arrays_in((args, kwargs))
        given, introduced = self._met(leaves, is_first)
        containers = containers_in((args, kwargs))
        before, pictures = snapshot(containers), self._pictures(leaves, given)
        result = call(*args, **kwargs)
        self._note_changed(leaves, given, pictures, position, layer)
        outcome = Outcome(result, effects(containers, before))
        recorded, handed_on = self._handed_on(outcome, position, layer, {id(a): i for i, a in enumerate(leaves)})
        self.calls.append(Call(layer, position, given, introduced, recorded))
        return handed_on.put(containers)

    def _between(self, call: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A module between layers: it runs as it does, and what it hands on is a value of the site that calls it."""
        result, site = call(*args, **kwargs), self._counter.num_positions
        given, introduced = self._met(arrays_in((result, args, kwargs)), True, site)
        self.calls.append(Call(None, site - 1, given, introduced, Outcome(None)))
        return result

    def _met(
        self, leaves: Sequence[mx.array], is_first: bool, earliest: int = 0
    ) -> tuple[tuple[int | None, ...], frozenset[int]]:
        """The values among arrays that were made outside of layers, and which of them are new.

        New ones are of the latest site of what they need, and of none before the earliest.
        """
        known = len(self.values)
        self._alive += leaves
        originals = [handle(leaf) for leaf in leaves]
        given = tuple(self._given(leaf, is_first, earliest) for leaf in leaves)
        self._note_mentions(dict(zip(given, originals, strict=True)), known)
        self._alive += originals
        return given, frozenset(range(known, len(self.values)))

    def finish(self, logits: Any) -> Trace:
        if not isinstance(logits, mx.array):
            raise ModelError(
                f"[model] {type(self._model).__module__} cannot be cut: its forward returns {type(logits).__name__}. "
                "Expected one array of logits. Wrap the model in one that returns its logits."
            )
        source = self._sources(logits)
        needs, reads, found = ((source,), frozenset[str](), ((source, ""),)) if isinstance(source, int) else source
        tail = Value(ArraySpec.of(logits), self._counter.num_positions, needs, reads, found)
        stand_ins = tuple(self._leaves[f"{_VALUE}{number}"] for number in range(len(self.values)))
        found = Trace(
            tuple(self._units), tuple(self.calls), tuple(self.values), tail, tuple(self.strangers), stand_ins=stand_ins
        )
        for value in found.live:
            if value in self._changed:
                raise ModelError(_changes_input(self._model, self._changed[value]))
        self._refuse_remembered()
        return replace(found, unread=tuple(self._unread(frozenset[str]().union(*found.reads))))

    def _unread(self, read: frozenset[str]) -> Iterator[tuple[int, str]]:
        """What layers hold and did not read, at every site that calls them."""
        layers_at = dict.fromkeys((call.position + 1, call.layer) for call in self.calls)
        left = {name: self._owners.get(id(array), set[int]()) for name, array in self._leaves.items()}
        for site, layer in layers_at:
            yield from ((site, name) for name, owners in left.items() if layer in owners and name not in read)

    def _refuse_remembered(self) -> None:
        """A parameter may be put in place anew, but not computed from the data, as a batch norm's running mean is."""
        now = dict(tree_flatten(self._model.parameters()))
        for name in [name for name, array in now.items() if id(array) not in self._names]:
            sources = self._sources(now[name])
            if isinstance(sources, int) or sources[0]:
                raise ModelError(_remembers(self._model, name))

    def _given(self, leaf: mx.array, is_first: bool, earliest: int) -> int | None:
        if id(leaf) in self._number:
            return self._number[id(leaf)]
        if not is_first or id(leaf) in self._from_tokens or id(leaf) in self._held:
            return None
        sources = self._sources(leaf)
        if isinstance(sources, int):
            return self._number.setdefault(id(leaf), sources)
        needs, reads, found = sources
        if not needs and not reads:
            self._from_tokens.add(id(leaf))
            return None
        site = max([earliest, *(self.values[v].site for v in needs)])
        fresh = self._add(leaf, Value(ArraySpec.of(leaf), site, needs, reads, found))
        self._leaves[f"{_VALUE}{len(self.values) - 1}"] = overwritten(leaf, fresh)
        return len(self.values) - 1

    def _handed_on(
        self, outcome: Outcome, position: int, layer: int, places: Mapping[int, int]
    ) -> tuple[Outcome, Outcome]:
        """What came of a call, recorded, and with fresh arrays."""
        fresh, known = dict[int, mx.array](), len(self.values)
        for leaf in outcome.arrays:
            if id(leaf) in places or id(leaf) in self._number:
                continue
            sources = self._sources(leaf)
            if isinstance(sources, int):
                self._number[id(leaf)] = sources
                self._alive.append(leaf)
                continue
            self._note_strangers(position, layer, sources[1])
            fresh[id(leaf)] = self._add(leaf, Value(ArraySpec.of(leaf), position + 1, *sources))

        self._note_mentions({self._number[id(leaf)]: leaf for leaf in outcome.arrays if id(leaf) in fresh}, known)

        def recorded(leaf: mx.array) -> Made | Given:
            return Given(places[id(leaf)]) if id(leaf) in places else Made(self._number[id(leaf)])

        return outcome.rebuilt(recorded), outcome.rebuilt(lambda leaf: fresh.get(id(leaf), leaf))

    def _add(self, leaf: mx.array, value: Value) -> mx.array:
        """A new value; returns the fresh array that takes the place of the one that was made."""
        fresh = mx.zeros(leaf.shape, leaf.dtype)
        self._number[id(leaf)] = self._number[id(fresh)] = len(self.values)
        self._leaves[f"{_VALUE}{len(self.values)}"] = handle(fresh)
        self._alive += [leaf, fresh]
        self.values.append(replace(value, is_stopped=is_stopped(leaf)))
        return fresh

    def _sources(self, array: mx.array) -> int | tuple[tuple[int, ...], frozenset[str], Mentions]:
        """The values and parameters that an array is computed from; or the value that it is, by another handle."""
        is_leaf, found = mentions(array, self._leaves)
        names = list(dict.fromkeys(name for name, _ in found))
        _refuse_state(self._model, find_layers(self._model), [self._kept[name] for name in names if name in self._kept])
        if is_leaf and names[-1].startswith(_VALUE):
            return int(names[-1].removeprefix(_VALUE))
        values = tuple(int(name.removeprefix(_VALUE)) for name in names if name.startswith(_VALUE))
        reads = frozenset(name for name in names if not name.startswith(_VALUE))
        return values, reads, tuple((_number(name), operation) for name, operation in found)

    def _note_mentions(self, originals: Mapping[int | None, mx.array], known: int) -> None:
        """Where MLX comes upon values in the graphs of others that were made together with them.

        `originals` are values as they were made, before fresh arrays took their place.
        """
        fresh = {value: array for value, array in originals.items() if value is not None and value >= known}
        early = {value: array for value, array in fresh.items() if not self.values[value].site}
        together = {**(self._early if early else {}), **fresh}
        self._early |= early
        for value, array in fresh.items() if len(together) > 1 else ():
            others = {f"{_MADE}{v}": other for v, other in together.items() if v != value}
            found = mentions(array, self._leaves | others)[1]
            self.values[value] = replace(
                self.values[value], mentions=tuple((_number(name), operation) for name, operation in found)
            )

    def _note_strangers(self, position: int, layer: int, reads: Iterable[str]) -> None:
        for name in sorted(reads):
            owners = self._owners.get(id(self._leaves[name]), {layer})
            if layer not in owners:
                self.strangers.append((position + 1, min(owners), name))

    def _pictures(self, leaves: Sequence[mx.array], given: Sequence[int | None]) -> list[str]:
        """The values among the arguments as graphs: different after a call that changed one in place."""
        return ["" if value is None else picture_of(leaf) for leaf, value in zip(leaves, given, strict=True)]

    def _note_changed(
        self,
        leaves: Sequence[mx.array],
        given: Sequence[int | None],
        before: Sequence[str],
        position: int,
        layer: int,
    ) -> None:
        """An argument that a call changed in place: a value of its own, which must not be used any more."""
        after = self._pictures(leaves, given)
        for leaf, old, new in zip(leaves, before, after, strict=True):
            if old != new and "rectangle" not in new:  # computed by now: there is no graph left to look at
                raise ModelError(_evaluates(self._model, layer))
            if old != new:
                self._changed[len(self.values)] = layer
                fresh = self._add(leaf, Value(ArraySpec.of(leaf), position + 1, (), frozenset()))
                self._leaves[f"{_VALUE}{len(self.values) - 1}"] = overwritten(leaf, fresh)


def _number(name: str) -> int | str:
    """The value that is named, or the parameter."""
    kind, colon, number = name.rpartition(":")
    return int(number) if kind + colon in (_VALUE, _MADE) else name


def _is_array(value: Any) -> bool:
    return isinstance(value, mx.array)


def _owners(layers: Sequence[nn.Module]) -> dict[int, set[int]]:
    """The layers that hold each parameter."""
    owners = dict[int, set[int]]()
    for number, layer in enumerate(layers):
        for _, array in tree_flatten(layer.parameters()):
            owners.setdefault(id(array), set()).add(number)
    return owners


Attributes = dict[tuple[int, str, str], Any]
"""By layer, module within it, and attribute."""


def _attributes(layers: Sequence[nn.Module]) -> Attributes:
    return {
        (number, name, str(key)): value
        for number, layer in enumerate(layers)
        for name, module in layer.named_modules()
        for key, value in [*module.items(), *vars(module).items()]
    }


def _changed(before: Attributes, after: Attributes) -> list[tuple[int, str, str]]:
    """What is another now; parameters aside, which are put in place before each forward."""

    def same(key: tuple[int, str, str], value: Any) -> bool:
        old = before.get(key)
        is_parameter = _is_array(old) and _is_array(value) and not key[2].startswith("_")
        return old is value or is_parameter or (isinstance(value, int | float | str) and old == value)

    return [key for key, value in after.items() if not same(key, value)]


def _refuse_state(model: nn.Module, layers: Sequence[nn.Module], changed: Sequence[tuple[int, str, str]]) -> None:
    if changed:
        number, name, key = changed[0]
        path = f"{name}.{key}" if name else key
        raise ModelError(
            f"[model] {type(model).__module__} cannot be cut: layer {number} ({type(layers[number]).__name__}) changes "
            f"its own `{path}` at every call and may read it at the next. Expected layers that keep nothing between "
            "calls. Let it return what it keeps."
        )


def _remembers(model: nn.Module, name: str) -> str:
    return (
        f"[model] {type(model).__module__} cannot be cut: its forward computes `{name}` from the data and keeps it for "
        "the next call, so that it would be another one where microbatches are run in another order or twice. Expected "
        "a forward that keeps nothing. Use a norm of each token by itself, as RMSNorm, in place of a batch norm."
    )


def _changes_input(model: nn.Module, layer: int) -> str:
    return (
        f"[model] {type(model).__module__} cannot be cut: layer {layer} changes its input in place, which is used "
        "afterwards: a stage that does not run the layer would not see it. Expected layers that return what they make. "
        "Let it work on a copy."
    )


def _evaluates(model: nn.Module, layer: int) -> str:
    return (
        f"[model] {type(model).__module__} cannot be cut: layer {layer} evaluates arrays in its forward, so that what "
        "it reads and hands on depends on the data. Expected a forward that only builds a graph. Train this model on "
        "one device with mlx_lm.lora and MLX_DISABLE_COMPILE=1: its step cannot be compiled either."
    )
