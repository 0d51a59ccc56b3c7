"""What every site of a model takes: bytes of weights, gradients, optimizer, residuals and boundaries, and operations.

All of it is read from shapes and unevaluated graphs, so a model of any size can be looked at on any machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten

from pptrain.graph import Parts, examine
from pptrain.microbatch import kept_random_state
from pptrain.model import ArraySpec, Specs
from pptrain.segment import Cut, Segment
from pptrain.stage import Recompute

_WORKING_SHARE = 1.5
"""What a backward needs besides what was kept, in residuals of the site that it is at: from 0.3 to 1.5 of them were
measured on small llamas."""
_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes that are there from the first step to the last."""

    weights: int = 0
    gradients: int = 0
    """Sums in float32 of all that trains."""
    optimizer: int = 0

    def __add__(self, other: Held) -> Held:
        return Held(self.weights + other.weights, self.gradients + other.gradients, self.optimizer + other.optimizer)

    @property
    def total(self) -> int:
        """All three."""
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True, slots=True)
class Site:
    """One site of the forward (see `pptrain.model.Trace`), for one microbatch."""

    held: Held
    """Of what no other site reads."""
    parts: Parts
    into_bytes: int
    """What enters it from the site before; nothing for the tokens."""


@dataclass(frozen=True)
class Sizes:
    """A model's sites, and what several of them share."""

    sites: tuple[Site, ...]
    shared: tuple[tuple[frozenset[int], Held], ...]
    """What more than one site reads, such as a tied embedding: every rank that has one of them holds it once."""
    first_trained: int
    """Sites before this one have no backward."""

    @property
    def num_layers(self) -> int:
        """Of the model."""
        return len(self.sites) - 1

    def held(self, stages: Iterable[range]) -> Held:
        """What a rank with these stages' sites holds."""
        stages = list(stages)
        total = Held()
        for stage in stages:
            total += _difference(self._held_sums, stage)
        for readers, held in self.shared:
            if any(site in stage for site in readers for stage in stages):
                total += held
        return total

    def boundary_bytes(self, stage: range) -> int:
        """What a stage keeps of its neighbours for one microbatch: what came in, and what it will be given back."""
        ends = [site for site in (stage.start, stage.stop) if 0 < site < len(self.sites)]
        return sum(self.sites[site].into_bytes for site in ends)

    def residual_bytes(self, stage: range, recompute: Recompute) -> int:
        """What a stage keeps of one microbatch between its forward and its backward."""
        trained = range(max(stage.start, self.first_trained), stage.stop)
        match recompute:
            case "none":
                sums = self._residual_sums
                return sums[trained.stop] - sums[trained.start] if trained else 0
            case "layer":
                starts = [site for site in trained if site != stage.start]
            case "stage":
                starts = [site for site in {1, self.first_trained} if site in trained and site != stage.start]
        return sum(self.sites[site].into_bytes for site in starts)

    def working_bytes(self, stage: range, recompute: Recompute) -> int:
        """What a backward needs for a while besides what was kept."""
        each = [self.sites[site].parts.residual_bytes for site in stage]
        again = {"none": 0, "layer": max(each), "stage": sum(each)}[recompute]
        return int(_WORKING_SHARE * max(each)) + again

    @cached_property
    def _held_sums(self) -> list[Held]:
        return list(accumulate((site.held for site in self.sites), initial=Held()))

    @cached_property
    def _residual_sums(self) -> list[int]:
        return list(accumulate((site.parts.residual_bytes for site in self.sites), initial=0))


def _difference(sums: Sequence[Held], stage: range) -> Held:
    a, b = sums[stage.start], sums[stage.stop]
    return Held(b.weights - a.weights, b.gradients - a.gradients, b.optimizer - a.optimizer)


def measure(cut: Cut, rows: int, seq: int, optimizer: optim.Optimizer) -> Sizes:
    """Look at a model as it is to be trained.

    Args:
        cut: The model, adapters put on.
        rows: Examples in a microbatch.
        seq: Tokens that a row is trained on.
        optimizer: Whose moments are counted.
    """
    readers = dict[str, list[int]]()
    for site, names in enumerate(cut.trace.uses):
        for name in names:
            readers.setdefault(name, []).append(site)
    trained = set(cut.trainable)
    held = {name: _held(cut.slots[name].array, name in trained, optimizer) for name in readers}
    own = [Held() for _ in range(cut.num_sites)]
    for name, sites in readers.items():
        if len(sites) == 1:
            own[sites[0]] += held[name]
    shared = tuple((frozenset(sites), held[name]) for name, sites in sorted(readers.items()) if len(sites) > 1)
    tokens = mx.zeros((rows, seq + 1), mx.int32)
    found = [_site(cut, site, tokens, own[site]) for site in range(cut.num_sites)]
    return Sizes(tuple(found), shared, cut.first_trained_site)


def _held(array: mx.array, trains: bool, optimizer: optim.Optimizer) -> Held:
    if not trains:
        return Held(array.nbytes)
    return Held(array.nbytes, _FLOAT32 * array.size, optimizer_bytes(optimizer, array))


def optimizer_bytes(optimizer: optim.Optimizer, parameter: mx.array) -> int:
    """What an optimizer keeps for a parameter: it is asked to start, and its moments are not evaluated."""
    state: dict[str, Any] = {}
    optimizer.init_single(parameter, state)
    moments: list[tuple[str, Any]] = tree_flatten(state)  # type: ignore[assignment]
    return sum(moment.nbytes for _, moment in moments)


def _site(cut: Cut, site: int, tokens: mx.array, held: Held) -> Site:
    into, segment = specs_into(cut, site, tokens), Segment(cut, range(site, site + 1))
    with kept_random_state():
        parts = examine(segment, tokens, into, specs_back(cut, site + 1, tokens))
    into_bytes = sum(spec.nbytes for spec in into)
    if segment.trains:  # What enters is given to the graph that is examined, and is kept as long as its residuals.
        parts = replace(parts, residual_bytes=parts.residual_bytes + into_bytes)
    return Site(held, parts, into_bytes)


def specs_into(cut: Cut, site: int, tokens: mx.array) -> Specs:
    """What enters a site going forward, nothing before the first; tokens are `[rows, seq + 1]`."""
    return cut.look(tokens[:, :-1]).crossing(site) if site else ()


def specs_back(cut: Cut, site: int, tokens: mx.array) -> Specs:
    """What comes back from a site: the cotangents of what enters it, and past the last that of the loss."""
    if site == cut.num_sites:
        return (ArraySpec((), mx.float32),)
    return cut.look(tokens[:, :-1]).returning(site)
