"""Schedules as data: pure functions that return each stage's actions, in order.

An action prints as `2F0`: stage 2, forward, microbatch 0. A schedule stands once, as a list, and is run, timed, drawn
and tested from that list.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from pptrain.errors import ConfigError, ScheduleError

Kind = Literal["F", "B", "I", "W"]
"""Forward; whole backward; its input part; its weight part."""


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One piece of work of one stage on one microbatch."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


StageSchedule = Callable[[int, int, int], list[Action]]
"""`schedule(stage, num_stages, num_microbatches)`: the actions of one stage, in order."""


def sequential(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """One microbatch at a time, all the way down and back: what is done without a pipeline.

    Holds the residuals of 1 microbatch. With 3 stages and 2 microbatches::

        stage 0   F0 .  .  .  .  B0 F1 .  .  .  .  B1
        stage 1   .  F0 .  .  B0 .  .  F1 .  .  B1 .
        stage 2   .  .  F0 B0 .  .  .  .  F1 B1 .  .
    """
    return [Action(stage, kind, j) for j in range(num_microbatches) for kind in ("F", "B")]


def gpipe(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """All forwards, then all backwards.

    Holds the residuals of all `num_microbatches`. With 3 stages and 3 microbatches::

        stage 0   F0 F1 F2 .  .  .  .  B0 B1 B2
        stage 1   .  F0 F1 F2 .  .  B0 B1 B2 .
        stage 2   .  .  F0 F1 F2 B0 B1 B2 .  .

    Source: Huang et al. 2019, https://arxiv.org/abs/1811.06965; backwards here go in ascending order, so that gradients
    are added in the order of one device.
    """
    return _forwards(stage, num_microbatches) + _backwards(stage, num_microbatches)


def one_f_one_b(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """Warmup, then one forward and one backward in turn, then cooldown.

    Holds the residuals of at most `num_stages - stage` microbatches. With 4 stages and 4 microbatches::

        stage 0   F0 F1 F2 F3 .  .  .  B0 .  B1 .  B2 .  B3      warmup 3
        stage 1   .  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3 .       warmup 2
        stage 2   .  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .  .       warmup 1
        stage 3   .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .  .       warmup 0

    Source: Narayanan et al. 2021, https://arxiv.org/abs/2104.04473
    """
    forwards, backwards = _forwards(stage, num_microbatches), _backwards(stage, num_microbatches)
    warmup = min(num_stages - 1 - stage, num_microbatches)
    steady = num_microbatches - warmup
    pairs = zip(forwards[warmup:], backwards[:steady], strict=True)
    return forwards[:warmup] + [action for pair in pairs for action in pair] + backwards[steady:]


def forward_only(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """Evaluation: forwards and nothing kept::

    stage 0   F0 F1 F2 .
    stage 1   .  F0 F1 F2
    """
    return _forwards(stage, num_microbatches)


SCHEDULES: dict[str, StageSchedule] = {"sequential": sequential, "gpipe": gpipe, "1f1b": one_f_one_b}
"""Training schedules by the name that `--schedule` takes."""


def find_schedule(name: str) -> StageSchedule:
    """The schedule of that name.

    Raises:
        ConfigError: If there is none; the message has the nearest names.
    """
    if name in SCHEDULES:
        return SCHEDULES[name]
    near = get_close_matches(name, SCHEDULES, n=2, cutoff=0.3)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise ConfigError(f"[schedule] Unknown schedule {name!r}. Expected one of {', '.join(SCHEDULES)}.{hint}")


def unroll(schedule: StageSchedule, num_stages: int, num_microbatches: int) -> dict[int, list[Action]]:
    """The actions of every stage."""
    return {stage: schedule(stage, num_stages, num_microbatches) for stage in range(num_stages)}


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


@dataclass(frozen=True, slots=True)
class Span:
    """When an action ran, in any unit of time."""

    action: Action
    start: float
    end: float


UNIT_COSTS: Mapping[Kind, float] = {"F": 1, "B": 2, "I": 1, "W": 1}
"""What F, B, I and W are taken to cost where nothing was measured: the input and weight parts as much as a forward."""


def spans(lists: Sequence[Sequence[Action]], num_stages: int, costs: Mapping[Kind, float] = UNIT_COSTS) -> list[Span]:
    """Run every list in order, each action as early as it can, and say when each ran, ordered by start.

    Args:
        lists: One list of actions for each rank.
        num_stages: How many stages the lists speak of together.
        costs: Duration of each kind.

    Raises:
        ScheduleError: If no list can go on: an action waits for one that never comes, or that stands behind it.
    """
    ends, heads, free, ran = dict[Action, float](), [0] * len(lists), [0.0] * len(lists), list[Span]()

    def start_of(rank: int) -> float | None:
        if heads[rank] == len(lists[rank]):
            return None
        before = needs(lists[rank][heads[rank]], num_stages, ends)
        return max([free[rank], *(ends[a] for a in before)]) if all(a in ends for a in before) else None

    for _ in range(sum(map(len, lists))):
        starts = [(start, rank) for rank in range(len(lists)) if (start := start_of(rank)) is not None]
        if not starts:
            raise ScheduleError(_stuck(lists, heads))
        start, rank = min(starts)
        action = lists[rank][heads[rank]]
        heads[rank] += 1
        free[rank] = ends[action] = start + costs[action.kind]
        ran.append(Span(action, start, free[rank]))
    return ran


def _stuck(lists: Sequence[Sequence[Action]], heads: Sequence[int]) -> str:
    stand = [
        f"rank {r} stands at {actions[h]} (action {h})"
        for r, (actions, h) in enumerate(zip(lists, heads, strict=True))
        if h < len(actions)
    ]
    return (
        "[schedule] No rank can go on:\n  " + "\n  ".join(stand) + "\nEvery action needs those before it to have run."
    )


def _forwards(stage: int, num_microbatches: int) -> list[Action]:
    return [Action(stage, "F", j) for j in range(num_microbatches)]


def _backwards(stage: int, num_microbatches: int) -> list[Action]:
    return [Action(stage, "B", j) for j in range(num_microbatches)]
