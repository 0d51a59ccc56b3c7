"""What one lazy forward shows about a model: where it can be cut, and what would cross each cut.

The forward runs once with recording layers and evaluates nothing. Every array that a layer is given or hands on becomes
a *value*: a fresh array takes its place, so that the graph between two values can be looked at by itself. What a
value is computed from, other values and parameters, follows from that graph, however it got there: as an argument, in
a tuple, through a dict that layers fill, or by a variable of the model's own forward. Arrays that depend on no
parameter (masks, positions) are no values: whoever needs them computes them from the tokens.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from pptrain.errors import ModelError
from pptrain.model import ArraySpec, Specs, Unit, find_layers, intercepted, units_of
from pptrain.structure import Outcome, arrays_in, containers_in, effects, snapshot

SAMPLE = (1, 8)
"""Shape of the tokens with which a model is looked at: any will do to see who reads which parameter."""


@dataclass(frozen=True, slots=True)
class Value:
    """An array that one part of the forward makes and another may use."""

    spec: ArraySpec
    site: int
    """Where it is made: see `Trace`."""
    needs: tuple[int, ...]
    """Values that it is computed from, in the order in which MLX comes upon them."""
    reads: frozenset[str]
    """Names of the parameters that it is computed from."""


@dataclass(frozen=True, slots=True)
class Made:
    """Stands in a recorded outcome for a value."""

    value: int


@dataclass(frozen=True, slots=True)
class Given:
    """Stands in a recorded outcome for an array that the call was given, by its place among these."""

    place: int


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a layer (or of a part of one, where the model calls the parts itself)."""

    layer: int
    position: int
    """Its layer's place in the forward, which is the layer's number where each is called once, in order."""
    given: tuple[int | None, ...]
    """The value that each array among the arguments is; None for one that depends on the tokens alone."""
    introduced: frozenset[int]
    """Values that were made outside of layers and are seen here first."""
    outcome: Outcome
    """What came of it: `Made` and `Given` instead of arrays."""


@dataclass(frozen=True)
class Trace:
    """What one lazy forward shows about a model, without reading a weight.

    A *site* is a part of the forward: site 0 is everything before the first layer (the embedding), site i + 1 is the
    layer at position i with whatever follows it until the next layer's input; the last site ends at the logits.
    """

    units: tuple[Unit, ...]
    calls: tuple[Call, ...]
    values: tuple[Value, ...]
    tail: Value
    """The logits."""
    strangers: tuple[tuple[int, int, str], ...] = ()
    """(site, layer, parameter of that layer) where a layer reads what belongs to another."""

    @property
    def num_positions(self) -> int:
        """Layers, counted as often as the forward passes through them."""
        return max((call.position for call in self.calls), default=-1) + 1

    @cached_property
    def uses(self) -> tuple[frozenset[str], ...]:
        """Names of the parameters that each site reads."""
        made = [self.tail, *(self.values[v] for v in self._live)]
        sites = range(self.num_positions + 1)
        return tuple(frozenset[str]().union(*(v.reads for v in made if v.site == site)) for site in sites)

    @cached_property
    def _live(self) -> list[int]:
        """Values that the logits depend on."""
        live = set(self.tail.needs)
        for v in reversed(range(len(self.values))):
            if v in live:
                live |= set(self.values[v].needs)
        return sorted(live)

    def crossing(self, site: int) -> list[int]:
        """The values that cross the cut before a site: made before it and used from it on.

        They stand in the order in which MLX comes upon them on its way down from the loss. A stage whose outputs stand
        in this order adds gradients in the order of one device: what a value receives from its users in later stages
        first, then those of its own stage.
        """
        found, seen, waiting = list[int](), set[int](), [*reversed(self.tail.needs)]
        while waiting:
            number = waiting.pop()
            if number in seen:
                continue
            seen.add(number)
            if self.values[number].site < site:
                found.append(number)
            else:
                waiting += reversed(self.values[number].needs)
        return found

    def specs(self, site: int) -> Specs:
        """Shapes and dtypes of what crosses the cut before a site."""
        return tuple(self.values[v].spec for v in self.crossing(site))

    @cached_property
    def boundaries(self) -> tuple[Specs, ...]:
        """What enters each layer."""
        return tuple(self.specs(position + 1) for position in range(self.num_positions))

    def with_gradient(self, trainable: Iterable[str]) -> frozenset[int]:
        """The values that have a gradient: floating ones that depend on a parameter that trains."""
        trained, found = set(trainable), set[int]()
        for number, value in enumerate(self.values):
            if mx.issubdtype(value.spec.dtype, mx.floating) and (
                value.reads & trained or found.intersection(value.needs)
            ):
                found.add(number)
        return frozenset(found)


def trace(model: nn.Module, tokens: mx.array) -> Trace:
    """Build the forward once, evaluating nothing, and see what is made and used where.

    Args:
        model: Any mlx-lm model; its weights may be lazy and stay so.
        tokens: `[microbatch_size, seq]`.

    Raises:
        ModelError: If the model cannot be cut: no layer is called, or one changes what it must not.
    """
    layers = find_layers(model)
    before = _attributes(layers)
    found = _trace(model, tokens)
    if _changed(before, after := _attributes(layers)):
        found = _trace(model, tokens)  # Something made at the first call may be kept; it must not change again.
        _refuse_state(model, layers, after, _attributes(layers))
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


def _trace(model: nn.Module, tokens: mx.array) -> Trace:
    for units in units_of(model):
        recorder = _Recorder(model, units)
        with intercepted([unit.module for unit in units], recorder.around):
            logits = model(tokens)
        if recorder.calls:
            return recorder.finish(logits)
    raise ModelError(
        f"[model] {type(model).__module__} cannot be cut: none of its layers is called in a forward. Expected a "
        "forward that calls `model.layers`. Train this model on one device with mlx_lm.lora."
    )


class _Recorder:
    """Stands in for every layer's call, and writes down what it was given and what came of it."""

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self.calls, self.values = list[Call](), list[Value]()
        self._model, self._units, self._counter = model, units, _Counter(units)
        parameters = dict(tree_flatten(model.parameters()))
        self._names = {id(array): name for name, array in parameters.items()}
        # One array may have several names; like `nn.Module.update`, the last one counts.
        self._leaves = {name: parameters[name] for name in self._names.values()}
        self._owners = _owners(find_layers(model))
        self._held = {id(a) for m in model.modules() for a in [*m.values(), *vars(m).values()] if _is_array(a)}
        self._number = dict[int, int]()
        self._from_tokens = set[int]()
        self._alive = list[mx.array]()  # so that no id comes twice
        self.strangers = list[tuple[int, int, str]]()

    def around(self, number: int, call: Any, /, *args: Any, **kwargs: Any) -> Any:
        is_first = self._counter.pass_through(number)
        position, layer = self._counter.num_positions - 1, self._units[number].layer
        leaves, known = arrays_in((args, kwargs)), len(self.values)
        self._alive += leaves
        given = tuple(self._given(leaf, is_first) for leaf in leaves)
        introduced = frozenset(range(known, len(self.values)))
        containers = containers_in((args, kwargs))
        before, pictures = snapshot(containers), self._pictures(leaves, given)
        result = call(*args, **kwargs)
        if pictures != self._pictures(leaves, given):
            raise ModelError(_changes_input(self._model, layer))
        outcome = Outcome(result, effects(containers, before))
        recorded, handed_on = self._handed_on(outcome, position, layer, {id(a): i for i, a in enumerate(leaves)})
        self.calls.append(Call(layer, position, given, introduced, recorded))
        return handed_on.put(containers)

    def finish(self, logits: Any) -> Trace:
        if not isinstance(logits, mx.array):
            raise ModelError(
                f"[model] {type(self._model).__module__} cannot be cut: its forward returns {type(logits).__name__}. "
                "Expected one array of logits. Wrap the model in one that returns its logits."
            )
        found = self._sources(logits)
        needs, reads = ((found,), frozenset[str]()) if isinstance(found, int) else found
        tail = Value(ArraySpec.of(logits), self._counter.num_positions, needs, reads)
        return Trace(tuple(self._units), tuple(self.calls), tuple(self.values), tail, tuple(self.strangers))

    def _given(self, leaf: mx.array, is_first: bool) -> int | None:
        if id(leaf) in self._number:
            return self._number[id(leaf)]
        if not is_first or id(leaf) in self._from_tokens or id(leaf) in self._held:
            return None
        sources = self._sources(leaf)
        if isinstance(sources, int):
            return self._number.setdefault(id(leaf), sources)
        needs, reads = sources
        if not needs and not reads:
            self._from_tokens.add(id(leaf))
            return None
        site = max((self.values[v].site for v in needs), default=0)
        fresh = self._add(leaf, Value(ArraySpec.of(leaf), site, needs, reads))
        self._leaves[f"{_VALUE}{len(self.values) - 1}"] = overwritten(leaf, fresh)
        return len(self.values) - 1

    def _handed_on(
        self, outcome: Outcome, position: int, layer: int, places: Mapping[int, int]
    ) -> tuple[Outcome, Outcome]:
        """What came of a call, recorded, and with fresh arrays."""
        fresh = dict[int, mx.array]()
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

        def recorded(leaf: mx.array) -> Made | Given:
            return Given(places[id(leaf)]) if id(leaf) in places else Made(self._number[id(leaf)])

        return outcome.rebuilt(recorded), outcome.rebuilt(lambda leaf: fresh.get(id(leaf), leaf))

    def _add(self, leaf: mx.array, value: Value) -> mx.array:
        """A new value; returns the fresh array that takes the place of the one that was made."""
        fresh = mx.zeros(leaf.shape, leaf.dtype)
        self._number[id(leaf)] = self._number[id(fresh)] = len(self.values)
        self._leaves[f"{_VALUE}{len(self.values)}"] = fresh
        self._alive += [leaf, fresh]
        self.values.append(value)
        return fresh

    def _sources(self, array: mx.array) -> int | tuple[tuple[int, ...], frozenset[str]]:
        """The values and parameters that an array is computed from; or the value that it is, by another handle."""
        is_leaf, names = sources(array, self._leaves)
        if is_leaf and names[-1].startswith(_VALUE):
            return int(names[-1].removeprefix(_VALUE))
        values = tuple(int(name.removeprefix(_VALUE)) for name in names if name.startswith(_VALUE))
        return values, frozenset(name for name in names if not name.startswith(_VALUE))

    def _note_strangers(self, position: int, layer: int, reads: Iterable[str]) -> None:
        for name in sorted(reads):
            owners = self._owners.get(id(self._leaves[name]), {layer})
            if layer not in owners:
                self.strangers.append((position + 1, min(owners), name))

    def _pictures(self, leaves: Sequence[mx.array], given: Sequence[int | None]) -> list[str]:
        """The values among the arguments as graphs: different after a call that changed one in place."""
        return [_picture(leaf) for leaf, value in zip(leaves, given, strict=True) if value is not None]


def handle(array: mx.array) -> mx.array:
    """Another handle of the same array: what a model does to its own in place is not seen through this one."""
    return array.astype(array.dtype)


def overwritten(array: mx.array, by: mx.array) -> mx.array:
    """Put an array in the place of another: every variable of the model that holds it sees the new one.

    Returns:
        What it is now: not the same node of the graph as `by` where the first dimension is 1.
    """
    array[...] = by
    return handle(array)


_VALUE = "value:"
"""Starts the names of values, and no parameter's."""

_END = "end:"


def sources(end: mx.array, leaves: Mapping[str, mx.array]) -> tuple[bool, list[str]]:
    """Which of the leaves an unevaluated array is computed from, in the order in which MLX comes upon them.

    Returns:
        Whether the array is itself the one leaf that is named; and their names.
    """
    # Each array is a line `{ "name"; }`, with its rank if it is an end; an array comes after what it is computed from,
    # and all leaves that the end does not need come after it.
    picture = _picture(end, **{_END: end, **leaves})
    nodes = re.findall(r'^\{ (?:rank=\w+; )?"(.+)"; \}$', picture, re.MULTILINE)
    if _END not in nodes:  # a leaf's name has taken its place
        return True, [next(name for name in nodes if name in leaves)]
    return False, [name for name in nodes[: nodes.index(_END)] if name in leaves]


def _picture(end: mx.array, **leaves: mx.array) -> str:
    picture = io.StringIO()
    mx.export_to_dot(picture, end, **leaves)
    return picture.getvalue()


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
    def same(key: tuple[int, str, str], value: Any) -> bool:
        old = before.get(key)
        return old is value or (isinstance(value, int | float | str) and old == value)

    return [key for key, value in after.items() if not same(key, value)]


def _refuse_state(model: nn.Module, layers: Sequence[nn.Module], before: Attributes, after: Attributes) -> None:
    if changed := _changed(before, after):
        number, name, key = changed[0]
        path = f"{name}.{key}" if name else key
        raise ModelError(
            f"[model] {type(model).__module__} cannot be cut: layer {number} ({type(layers[number]).__name__}) changes "
            f"its own `{path}` at every call. Expected layers that keep nothing between calls. Let it return what it "
            "keeps."
        )


def _changes_input(model: nn.Module, layer: int) -> str:
    return (
        f"[model] {type(model).__module__} cannot be cut: layer {layer} changes its input in place, which a stage that "
        "does not run it would not see. Expected layers that return what they make. Let it work on a copy."
    )
