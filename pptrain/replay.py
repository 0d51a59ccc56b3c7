"""A part of the model's forward, run by the model itself: the sites of a segment for real, all others as recorded."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from pptrain.errors import ModelError
from pptrain.lazy import handle, overwritten
from pptrain.model import Boundary, Unit
from pptrain.structure import Outcome, arrays_in, containers_in, effects, snapshot
from pptrain.values import Call, Given, Made, Trace


class Reached(Exception):
    """Ends a forward early: all that crosses the cut behind the segment is known."""


class Replay:
    """Stands in for every layer's call during one forward.

    Args:
        trace: What is recorded.
        sites: Those that are run.
        known: Values of other sites, which those that are run may need.
        end: The site that is the first not to be reached; one past the last for a forward to its end.
    """

    seed_of: Callable[[int], int]
    """The random state in which a layer is called, by its number from 1; and that after its call, by minus that."""

    def __init__(self, trace: Trace, sites: Container[int], known: Mapping[int, mx.array], end: int) -> None:
        self._trace, self._sites, self._known, self._end = trace, sites, dict(known), end
        self._wanted = [] if end > trace.num_positions else trace.crossing(end)
        self._next = 0

    @staticmethod
    def of_segment(trace: Trace, sites: range, boundary: Boundary) -> Replay:
        """Runs consecutive sites, of which what crosses before them is known."""
        entering = trace.crossing(sites.start) if sites.start else []
        return Replay(trace, sites, dict(zip(entering, boundary, strict=True)), sites.stop)

    @property
    def modules(self) -> list[nn.Module]:
        """What is to be intercepted."""
        return [unit.module for unit in self._trace.units]

    def outputs(self) -> Boundary:
        """What crosses the cut behind the segment, after the forward has reached it."""
        return [self._known[value] for value in self._wanted]

    def forget(self) -> None:
        """Let go of all values: classes that stood in for the layers' own hold this until garbage is collected."""
        self._known.clear()

    def around(self, number: int, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Stand in for a call: run it, or replay what came of it."""
        unit = self._trace.units[number]
        recorded = self._recorded(unit)
        if recorded.layer is None:
            result = call(*args, **kwargs)  # what lies outside of the segment is built, and never evaluated
            self._meet(unit, recorded, arrays_in((result, args, kwargs)))
            return result
        leaves, containers = arrays_in((args, kwargs)), containers_in((args, kwargs))
        self._meet(unit, recorded, leaves)
        site = recorded.position + 1
        if site >= self._end and all(value in self._known for value in self._wanted):
            raise Reached
        if unit.is_whole:
            mx.random.seed(self.seed_of(recorded.layer + 1))
        if site in self._sites:
            before = snapshot(containers)
            result = call(*args, **kwargs)
            self._keep(unit, recorded, Outcome(result, effects(containers, before)))
        else:
            result = self._played(recorded, leaves).put(containers)
        if unit.is_whole:
            mx.random.seed(self.seed_of(-recorded.layer - 1))
        return result

    def _recorded(self, unit: Unit) -> Call:
        calls, place = self._trace.calls, self._next
        self._next += 1
        if place >= len(calls) or calls[place].layer != unit.layer:
            raise ModelError(
                f"[model] {unit.name} was called out of turn (call {place}): this forward "
                "goes another way than one with other tokens of the same shape. Expected a forward that depends on the "
                "tokens' shape only. Train this model on one device with mlx_lm.lora."
            )
        return calls[place]

    def _meet(self, unit: Unit, recorded: Call, leaves: Sequence[mx.array]) -> None:
        """Values that were made outside of layers and are seen here first: taken from here, or put here."""
        if len(leaves) != len(recorded.given):
            raise ModelError(_other_form(unit, len(leaves), len(recorded.given)))
        for leaf, value in zip(leaves, recorded.given, strict=True):
            if value not in recorded.introduced:
                continue
            if self._trace.values[value].site in self._sites:
                self._known.setdefault(value, handle(leaf))  # one that is handed on twice stays what it is
            elif value in self._known:
                self._known[value] = overwritten(leaf, self._known[value])

    def _keep(self, unit: Unit, recorded: Call, outcome: Outcome) -> None:
        """Own handles of what a call made: some models change the array in place afterwards."""
        places = _leaves_of(recorded.outcome)
        arrays = outcome.arrays
        if len(arrays) != len(places):
            raise ModelError(_other_form(unit, len(arrays), len(places)))
        for array, place in zip(arrays, places, strict=True):
            if isinstance(place, Made) and place.value not in self._known:
                self._known[place.value] = handle(array)

    def _played(self, recorded: Call, leaves: Sequence[mx.array]) -> Outcome:
        """What came of a call when it was recorded, with the arrays of this forward."""

        def array(place: Made | Given) -> mx.array:
            if isinstance(place, Given):
                return leaves[place.place]
            if place.value in self._known:
                return handle(self._known[place.value])
            spec = self._trace.values[place.value].spec
            return mx.zeros(spec.shape, spec.dtype)  # never evaluated

        return recorded.outcome.rebuilt(array, kind=_PLACE)


_PLACE: Any = (Made, Given)


def _leaves_of(recorded: Outcome) -> list[Made | Given]:
    found = list[Made | Given]()

    def note(place: Made | Given) -> Made | Given:
        found.append(place)
        return place

    recorded.rebuilt(note, kind=_PLACE)
    return found


def _other_form(unit: Unit, found: int, expected: int) -> str:
    return (
        f"[model] {unit.name} has {found} arrays where {expected} were expected: this forward goes another "
        "way than one with other tokens of the same shape. Expected a forward that depends on the tokens' shape only. "
        "Train this model on one device with mlx_lm.lora."
    )
