"""Schedules as data: pure functions that return what each rank does, in order.

An action prints as `2F0`: stage 2, forward, microbatch 0. A schedule stands once, as a value, and is run, timed, drawn
and tested from that value.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pptrain.errors import ScheduleError

Kind = Literal["F", "B", "I", "W"]
"""Forward; whole backward; its input part; its weight part."""

Placement = tuple[int, ...]
"""The rank of each stage."""


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One piece of work of one stage on one microbatch."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which stages each rank holds, and what it does with them, in order."""

    name: str
    num_microbatches: int
    placement: Placement
    actions: tuple[tuple[Action, ...], ...]
    """One list for each rank."""

    @property
    def num_ranks(self) -> int:
        """P of the formulas where each rank has one stage."""
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """Of all ranks together."""
        return len(self.placement)

    def stages(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, ascending."""
        return stages_of(self.placement, rank)


Builder = Callable[[int, int], Schedule]
"""`builder(num_ranks, num_microbatches)`: the schedule for so many."""


def stages_of(placement: Placement, rank: int) -> tuple[int, ...]:
    """The stages that a rank holds, ascending."""
    return tuple(stage for stage, holder in enumerate(placement) if holder == rank)


def loop(num_ranks: int, stages_per_rank: int = 1) -> Placement:
    """Stage s on rank s % P: once through all ranks, or again and again."""
    return tuple(range(num_ranks)) * stages_per_rank


def vee(num_ranks: int) -> Placement:
    """Two stages a rank, down the ranks and back up: stage s on rank s, and from P on, on rank 2P - 1 - s."""
    return (*range(num_ranks), *reversed(range(num_ranks)))


def check_sizes(name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> None:
    """Every schedule takes any number of ranks and microbatches, from 1.

    Raises:
        ScheduleError: If one is below 1.
    """
    sizes = {"ranks": num_ranks, "microbatches": num_microbatches, "stages a rank": stages_per_rank}
    for noun, size in sizes.items():
        if size < 1:
            raise ScheduleError(f"[schedule] {name} was asked for {size} {noun}. Expected at least 1.")


def sequential(num_ranks: int, num_microbatches: int) -> Schedule:
    """One microbatch at a time, all the way down and back: what is done without a pipeline.

    Holds the residuals of 1 microbatch. With 3 ranks and 2 microbatches::

        stage 0   F0 .  .  .  .  B0 F1 .  .  .  .  B1
        stage 1   .  F0 .  .  B0 .  .  F1 .  .  B1 .
        stage 2   .  .  F0 B0 .  .  .  .  F1 B1 .  .
    """
    return straight("sequential", num_ranks, num_microbatches, lambda stage, m: alternating(stage, m, 0))


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards.

    Holds the residuals of all `num_microbatches`. With 3 ranks and 3 microbatches::

        stage 0   F0 F1 F2 .  .  .  .  B0 B1 B2
        stage 1   .  F0 F1 F2 .  .  B0 B1 B2 .
        stage 2   .  .  F0 F1 F2 B0 B1 B2 .  .

    Source: Huang et al. 2019, https://arxiv.org/abs/1811.06965; backwards here go in ascending order, so that gradients
    are added in the order of one device.
    """
    return straight("gpipe", num_ranks, num_microbatches, lambda stage, m: alternating(stage, m, m))


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Warmup, then one forward and one backward in turn, then cooldown.

    Stage s holds the residuals of at most `num_ranks - s` microbatches. With 4 ranks and 4 microbatches::

        stage 0   F0 F1 F2 F3 .  .  .  B0 .  B1 .  B2 .  B3      warmup 3
        stage 1   .  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3 .       warmup 2
        stage 2   .  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .  .       warmup 1
        stage 3   .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .  .       warmup 0

    Source: Narayanan et al. 2021, https://arxiv.org/abs/2104.04473
    """
    return straight("1f1b", num_ranks, num_microbatches, lambda stage, m: alternating(stage, m, num_ranks - 1 - stage))


def forward_only(placement: Placement, num_microbatches: int) -> Schedule:
    """Evaluation: forwards and nothing kept, wherever the stages lie::

        stage 0   F0 F1 F2 .
        stage 1   .  F0 F1 F2

    In the order of stage + microbatch, in which every forward comes after those that it needs.
    """
    every = [Action(stage, "F", j) for stage in range(len(placement)) for j in range(num_microbatches)]
    every.sort(key=lambda action: (action.stage + action.microbatch, -action.stage))
    return spread("forward", num_microbatches, placement, every)


def straight(name: str, num_ranks: int, num_microbatches: int, row: Callable[[int, int], Iterable[Action]]) -> Schedule:
    """A schedule of one stage a rank from `row(stage, num_microbatches)`, that stage's actions."""
    check_sizes(name, num_ranks, num_microbatches)
    rows = tuple(tuple(row(stage, num_microbatches)) for stage in range(num_ranks))
    return Schedule(name, num_microbatches, loop(num_ranks), rows)


def spread(name: str, num_microbatches: int, placement: Placement, sequence: Sequence[Action]) -> Schedule:
    """A schedule from one sequence of all actions, of which each rank does its own."""
    rows: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    for action in sequence:
        rows[placement[action.stage]].append(action)
    return Schedule(name, num_microbatches, placement, tuple(map(tuple, rows)))


def alternating(stage: int, num_microbatches: int, warmup: int) -> list[Action]:
    """So many forwards, then one forward and one backward in turn, then the backwards that are left."""
    forwards = [Action(stage, "F", j) for j in range(num_microbatches)]
    backwards = [Action(stage, "B", j) for j in range(num_microbatches)]
    warmup = min(warmup, num_microbatches)
    steady = [action for pair in zip(forwards[warmup:], backwards, strict=False) for action in pair]
    return forwards[:warmup] + steady + backwards[num_microbatches - warmup :]


def needs(action: Action, num_stages: int, done: Container[Action]) -> list[Action]:
    """The actions that must have ended before this one starts, other than by the order of its own list.

    A backward may be one `B`, or an `I` and a `W`; which of the two another stage uses is seen from `done`.
    """
    stage, j = action.stage, action.microbatch
    if action.kind == "F":
        return [Action(stage - 1, "F", j)] if stage else []
    if action.kind == "W":
        return [Action(stage, "I", j)]
    above = [] if stage == num_stages - 1 else [_backward_of(stage + 1, j, done)]
    return [Action(stage, "F", j), *above]


def _backward_of(stage: int, microbatch: int, done: Container[Action]) -> Action:
    split = Action(stage, "I", microbatch)
    return split if split in done else Action(stage, "B", microbatch)
