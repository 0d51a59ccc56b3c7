"""What a trace has found: the calls of layers, the values they make and use, and which of them cross a cut."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

from pptrain.model import ArraySpec, Specs, Unit
from pptrain.structure import Outcome

Mentions = tuple[tuple[int | str, str], ...]
"""(value or parameter, the operation that reads it, or nothing where MLX comes upon it)."""


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
    mentions: Mentions = ()
    """Values and parameters in its graph where MLX comes upon them, and once more, with the operation, where one reads
    them.
    """
    is_stopped: bool = False
    """Whether `mx.stop_gradient` made it, so that it has no gradient."""


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
    """One call of a unit: a layer, a part of one where the model calls the parts itself, or a module between layers."""

    layer: int | None
    """None for a module between layers."""
    position: int
    """Its layer's place in the forward, which is the layer's number where each is called once, in order. Of a module
    between layers that of the layer before it.
    """
    given: tuple[int | None, ...]
    """The value that each array among the arguments is, and of a module between layers among what it hands on; None for
    one that depends on the tokens alone.
    """
    introduced: frozenset[int]
    """Values that were made outside of layers and are seen here first."""
    outcome: Outcome
    """What came of it: `Made` and `Given` instead of arrays. Nothing of a module between layers, which always runs."""


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
    unread: tuple[tuple[int, str], ...] = ()
    """(site, parameter) of each layer that holds what this forward does not read: with longer tokens it may."""
    stand_ins: tuple[mx.array, ...] = ()
    """The arrays that took the values' place in that forward."""

    @property
    def num_positions(self) -> int:
        """Layers, counted as often as the forward passes through them."""
        return max((call.position for call in self.calls), default=-1) + 1

    @cached_property
    def uses(self) -> tuple[frozenset[str], ...]:
        """Names of the parameters that each site reads, or may read with tokens of another shape."""
        uses = [set(names) for names in self.reads]
        for site, name in self.unread:
            uses[site].add(name)
        return tuple(map(frozenset, uses))

    @cached_property
    def reads(self) -> tuple[frozenset[str], ...]:
        """Names of the parameters that each site reads with tokens of this shape."""
        made = [self.tail, *(self.values[v] for v in self.live)]
        sites = range(self.num_positions + 1)
        return tuple(frozenset[str]().union(*(v.reads for v in made if v.site == site)) for site in sites)

    @cached_property
    def live(self) -> list[int]:
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

    @cached_property
    def readers(self) -> dict[int | str, list[int]]:
        """The sites of the operations that read each live value and each parameter, in the order in which one device
        adds up its gradient: the last operation that MLX comes upon, on its way down from the loss, is the first.
        """
        found, seen, readers = dict[int | str, list[int]](), set[int](), dict[str, Value]()
        waiting = [(self.tail, iter(self.tail.mentions))]
        while waiting:
            value, mentions = waiting[-1]
            for read, operation in mentions:
                if operation and readers.setdefault(operation, value) is value:  # not in another value's graph, too
                    found.setdefault(read, []).insert(0, value.site)
                elif not operation and isinstance(read, int) and read not in seen:
                    seen.add(read)
                    waiting.append((self.values[read], iter(self.values[read].mentions)))
                    break
            else:
                waiting.pop()
        return found

    def out_of_order(self, site: int) -> list[int | str]:
        """Values and parameters whose gradient a cut before a site adds up in another order than one device.

        They are read on both sides of the cut, and one device adds a term from behind it after one from before it,
        while what comes from behind the cut is one sum. Two terms may change places. Or what operations make of them
        between layers is used on both sides, and so is made twice, with two gradients where one device has their sum.
        """
        sides = {read: [reader >= site for reader in readers] for read, readers in self.readers.items()}
        found = [read for read, later in sides.items() if len(later) > 2 and later != sorted(later, reverse=True)]
        made_twice = {read for read, sites in self.made_between if min(sites) < site <= max(sites)}
        return list(dict.fromkeys([*found, *sorted(made_twice, key=str)]))

    @cached_property
    def made_between(self) -> list[tuple[int | str, set[int]]]:
        """What operations between layers read whose result no layer is given, but several sites use: with these."""
        sites = dict[tuple[int | str, str], set[int]]()
        for value in self._mentioned:
            for read, operation in value.mentions:
                if operation:
                    sites.setdefault((read, operation), set()).add(value.site)
        return [(read, used) for (read, _), used in sites.items() if len(used) > 1]

    @property
    def _mentioned(self) -> list[Value]:
        """The logits, and the values whose graphs theirs is made of."""
        found, waiting = dict[int, Value](), [self.tail]
        while waiting:
            reads = [read for read, _ in waiting.pop().mentions if isinstance(read, int) and read not in found]
            found |= {read: self.values[read] for read in reads}
            waiting += [self.values[read] for read in dict.fromkeys(reads)]
        return [self.tail, *found.values()]

    def specs(self, site: int) -> Specs:
        """Shapes and dtypes of what crosses the cut before a site."""
        return tuple(self.values[v].spec for v in self.crossing(site))

    @cached_property
    def boundaries(self) -> tuple[Specs, ...]:
        """What enters each layer."""
        return tuple(self.specs(position + 1) for position in range(self.num_positions))

    def with_gradient(self, trainable: Iterable[str]) -> frozenset[int]:
        """The values that have a gradient: real or complex ones, not stopped, of a parameter that trains."""
        trained, found = set(trainable), set[int]()
        for number, value in enumerate(self.values):
            is_open = mx.issubdtype(value.spec.dtype, mx.inexact) and not value.is_stopped
            if is_open and (value.reads & trained or found.intersection(value.needs)):
                found.add(number)
        return frozenset(found)
