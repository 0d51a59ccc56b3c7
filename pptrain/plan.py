"""What a model takes on given machines, how it is cut best, and which schedule is the fastest of those that fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import get_args

from pptrain import partition
from pptrain.auto import most_held
from pptrain.errors import PartitionError
from pptrain.registry import SCHEDULES, find_schedule
from pptrain.schedule import Kind, Schedule, stages_of
from pptrain.simulate import Costs, Link, simulate
from pptrain.sizes import Sizes
from pptrain.stage import Recompute

RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)

_AS_FAST = 1.01

Seconds = tuple[float, float, float]
"""Of a forward, of the input part of its backward, and of the weight part, for one microbatch."""


@dataclass(frozen=True, slots=True)
class Machines:
    """One for each rank, and the links between them."""

    memory_bytes: tuple[float, ...]
    """What training may use."""
    seconds: tuple[tuple[Seconds, ...], ...]
    """For each rank, what each site of the model takes there."""
    link_seconds: float | Mapping[Link, float] = 0.0
    """How long a boundary travels."""

    @property
    def num_ranks(self) -> int:
        """How many there are."""
        return len(self.memory_bytes)


def seconds_at(sizes: Sizes, flops_per_second: float) -> tuple[Seconds, ...]:
    """What each site takes on a machine that is known by its speed in products of matrices alone."""
    parts = [site.parts for site in sizes.sites]
    counts = [(part.forward_flops, part.input_flops, part.weight_flops) for part in parts]
    return tuple((f / flops_per_second, i / flops_per_second, w / flops_per_second) for f, i, w in counts)


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What a rank runs and what it needs for that, in bytes."""

    rank: int
    layers: tuple[int, ...]
    """Of each of its stages."""
    weights: int
    gradients: int
    optimizer: int
    residuals: int
    boundaries: int
    working: int
    """What a backward needs for a while."""
    limit: float

    @property
    def total(self) -> int:
        """At the most."""
        return self.weights + self.gradients + self.optimizer + self.residuals + self.boundaries + self.working


@dataclass(frozen=True, slots=True)
class Option:
    """A schedule, a recompute mode and a cut, with what they come to."""

    schedule: str
    recompute: Recompute
    num_microbatches: int
    layers: tuple[int, ...]
    """Of every stage, in forward order."""
    is_balanced: bool
    """False for an even cut: ranks with several stages have no balanced one yet."""
    bubble: float
    step_seconds: float
    ranks: tuple[RankPlan, ...]

    @property
    def fits(self) -> bool:
        """Whether every rank keeps its limit."""
        return all(rank.total <= rank.limit for rank in self.ranks)

    @property
    def fullest(self) -> RankPlan:
        """The rank with the least room."""
        return max(self.ranks, key=lambda rank: rank.total / rank.limit)


def options(
    sizes: Sizes,
    machines: Machines,
    num_microbatches: int,
    schedules: Sequence[str] = tuple(SCHEDULES),
    recomputes: Sequence[Recompute] = RECOMPUTE,
) -> list[Option]:
    """Every schedule in every recompute mode, as it is cut best; those with more stages than layers are left out.

    Raises:
        PartitionError: If there are more ranks than layers.
    """
    partition.even(sizes.num_layers, machines.num_ranks)
    built = [find_schedule(name)(machines.num_ranks, num_microbatches) for name in schedules]
    return [
        option(sizes, machines, schedule, recompute)
        for recompute, schedule in product(recomputes, built)
        if schedule.num_stages <= sizes.num_layers
    ]


def best(found: Sequence[Option]) -> Option | None:
    """The fastest that fits; of those that take up to a hundredth longer, the one that leaves the most room."""
    fitting = [one for one in found if one.fits]
    shortest = min((one.step_seconds for one in fitting), default=0.0)
    as_fast = [one for one in fitting if one.step_seconds <= _AS_FAST * shortest]
    return roomiest(as_fast) if as_fast else None


def roomiest(found: Sequence[Option]) -> Option:
    """The one whose fullest rank fills the least share of its memory."""
    return min(found, key=lambda one: (one.fullest.total / one.fullest.limit, one.step_seconds))


def option(sizes: Sizes, machines: Machines, schedule: Schedule, recompute: Recompute) -> Option:
    """A schedule with its best cut: balanced, or where nothing fits the roomiest; even for several stages a rank."""
    is_balanced = schedule.num_stages == schedule.num_ranks
    layers = partition.even(sizes.num_layers, schedule.num_stages)
    if is_balanced:
        layers = _cut(sizes, machines, schedule, recompute)
    stages = [partition.sites(each) for each in partition.ranges(layers)]
    timing = simulate(schedule, _costs(machines, schedule, stages, recompute))
    ranks = [_rank(sizes, machines, schedule, stages, layers, recompute, rank) for rank in range(machines.num_ranks)]
    name, m = schedule.name, schedule.num_microbatches
    return Option(name, recompute, m, layers, is_balanced, timing.bubble, timing.makespan, tuple(ranks))


def balanced_layers(sizes: Sizes, machines: Machines, schedule: Schedule, recompute: Recompute) -> tuple[int, ...]:
    """The balanced cut for a schedule of one stage a rank.

    Raises:
        PartitionError: If none fits, or a rank has several stages.
    """
    if schedule.num_stages != schedule.num_ranks:
        raise PartitionError(
            f"[layers] auto cuts for schedules of one stage a rank, and {schedule.name} has "
            f"{schedule.num_stages // schedule.num_ranks}. Expected another schedule, or a cut. Leave out --layers for "
            "an even cut, or list the layers."
        )
    totals = [[sum(site) + _again(site, recompute) for site in machine] for machine in machines.seconds]
    return partition.balanced(totals, _needs(sizes, schedule, recompute), machines.memory_bytes)


def _cut(sizes: Sizes, machines: Machines, schedule: Schedule, recompute: Recompute) -> tuple[int, ...]:
    needs = _needs(sizes, schedule, recompute)
    try:
        return balanced_layers(sizes, machines, schedule, recompute)
    except PartitionError:
        return partition.roomiest(sizes.num_layers, needs, machines.memory_bytes)


def _needs(sizes: Sizes, schedule: Schedule, recompute: Recompute) -> partition.Needs:
    """Bytes of a stage that has a rank to itself."""
    live = most_held(schedule)

    def needs(stage: int, sites: range) -> float:
        each = sizes.residual_bytes(sites, recompute) + sizes.boundary_bytes(sites)
        return sizes.held([sites]).total + live[stage] * each + sizes.working_bytes(sites, recompute)

    return needs


def _again(site: Seconds, recompute: Recompute) -> float:
    """What a backward runs a second time; nothing where there is no backward."""
    forward, *backward = site
    return forward if recompute != "none" and any(backward) else 0.0


def _costs(machines: Machines, schedule: Schedule, stages: Sequence[range], recompute: Recompute) -> Costs:
    durations = list[dict[Kind, float]]()
    for stage, rank in zip(stages, schedule.placement, strict=True):
        own = machines.seconds[rank][stage.start : stage.stop]
        forward, inputs, weights = (sum(column) for column in zip(*own, strict=True))
        durations.append({"F": forward, "I": inputs + sum(_again(site, recompute) for site in own), "W": weights})
    return Costs(durations, machines.link_seconds)


def _rank(
    sizes: Sizes,
    machines: Machines,
    schedule: Schedule,
    stages: Sequence[range],
    layers: Sequence[int],
    recompute: Recompute,
    rank: int,
) -> RankPlan:
    own = stages_of(schedule.placement, rank)
    held = sizes.held([stages[stage] for stage in own])
    residuals = {stage: sizes.residual_bytes(stages[stage], recompute) for stage in own}
    boundaries = {stage: sizes.boundary_bytes(stages[stage]) for stage in own}
    most = _most_kept(schedule, rank, {stage: (residuals[stage], boundaries[stage]) for stage in own})
    return RankPlan(
        rank,
        tuple(layers[stage] for stage in own),
        held.weights,
        held.gradients,
        held.optimizer,
        *most,
        max(sizes.working_bytes(stages[stage], recompute) for stage in own),
        machines.memory_bytes[rank],
    )


def _most_kept(schedule: Schedule, rank: int, each: Mapping[int, tuple[int, int]]) -> tuple[int, int]:
    """Residuals and boundaries at the moment when a rank keeps the most of both: from a forward to the weight part."""
    live = most = (0, 0)
    for action in schedule.actions[rank]:
        sign = {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
        live = (live[0] + sign * each[action.stage][0], live[1] + sign * each[action.stage][1])
        most = max(most, live, key=sum)
    return most
