"""`auto`: the shortest schedule that a search finds for measured costs, within a limit on live residuals.

The heuristic of Qi et al. 2023 (Zero Bubble Pipeline Parallelism, https://arxiv.org/abs/2401.10241, section 3.1): a
schedule is made greedily in the order of time, with a few choices left open; all are tried, and the best is kept::

    a rank is free:   an input part that has come, since another rank waits for its cotangent
                      else a forward, while the limit and the warmup allow, else a weight part
                      else, or where an input part comes so soon that it would be kept waiting, nothing
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import product
from math import inf

from pptrain.errors import ScheduleError
from pptrain.registry import SCHEDULES
from pptrain.schedule import Action, Kind, Placement, Schedule, check_sizes, spread, stages_of
from pptrain.simulate import Costs, simulate

_TOLERANCE = 1e-9
_TIMED_AGAIN = 8
"""So many of the best are timed as lists, in which nothing waits on purpose."""


def auto(
    placement: Placement, num_microbatches: int, costs: Costs, limit: float | Sequence[float], weight_share: float = 1.0
) -> Schedule:
    """The schedule with the shortest longest span that was found; never a longer one than a named schedule's.

    Args:
        placement: The rank of each stage; `loop(num_ranks)` for one each.
        num_microbatches: How many there are.
        costs: Of F, I and W for each stage, and of links.
        limit: Residuals that a rank may hold at a time, in stages times microbatches; of every rank, or of each.
        weight_share: What is left of a microbatch's residuals between its input part and its weight part. With 1 all
            of them are; for a transformer Qi et al. count `32 / (34 + 5 heads * seq / hidden)`.

    Raises:
        ScheduleError: If a rank may not even hold one microbatch of each of its stages.
    """
    num_ranks = max(placement) + 1
    check_sizes("auto", num_ranks, num_microbatches)
    limits = (limit,) * num_ranks if isinstance(limit, int | float) else tuple(limit)
    _check_limits(placement, limits)
    found = _named(placement, num_microbatches, limits, weight_share)
    made = [_Greedy(placement, num_microbatches, costs, limits, weight_share, c).run() for c in _choices(placement)]
    made = sorted((one for one in made if one is not None), key=lambda one: one[0])[:_TIMED_AGAIN]
    found += [spread("auto", num_microbatches, placement, sequence) for _, sequence in made]
    timings = [simulate(schedule, costs) for schedule in found]
    best = min(timings, key=lambda timing: (timing.longest_span, timing.makespan)).schedule
    return Schedule("auto", num_microbatches, placement, best.actions)


def most_held(schedule: Schedule, weight_share: float = 1.0) -> list[float]:
    """The most residuals that each rank holds at a time; `weight_share` as for `auto`."""
    changes: dict[Kind, float] = {"F": 1.0, "B": -1.0, "I": weight_share - 1.0, "W": -weight_share}
    most = list[float]()
    for actions in schedule.actions:
        live = peak = 0.0
        for action in actions:
            live += changes[action.kind]
            peak = max(peak, live)
        most.append(peak)
    return most


def _check_limits(placement: Placement, limits: Sequence[float]) -> None:
    if len(limits) != max(placement) + 1:
        raise ScheduleError(f"[auto] {len(limits)} limits for {max(placement) + 1} ranks. Expected one for each.")
    for rank, limit in enumerate(limits):
        least = len(stages_of(placement, rank))
        if limit < least:
            raise ScheduleError(
                f"[auto] Rank {rank} may hold {limit:g} residuals, but has {least} stages. Expected a limit of one "
                "microbatch of each or more. Raise the limit, or cut the model finer."
            )


def _named(placement: Placement, num_microbatches: int, limits: Sequence[float], weight_share: float) -> list[Schedule]:
    """The named schedules of this placement that keep the limits; one microbatch after another always does."""
    stages = range(len(placement))
    one_by_one = [
        action
        for j in range(num_microbatches)
        for action in [
            *(Action(stage, "F", j) for stage in stages),
            *(part for stage in reversed(stages) for part in (Action(stage, "I", j), Action(stage, "W", j))),
        ]
    ]
    built = [builder(max(placement) + 1, num_microbatches) for builder in SCHEDULES.values()]
    built = [schedule for schedule in built if schedule.placement == placement]
    built.append(spread("sequential", num_microbatches, placement, one_by_one))
    return [
        schedule
        for schedule in built
        if all(a <= b + _TOLERANCE for a, b in zip(most_held(schedule, weight_share), limits, strict=True))
    ]


@dataclass(frozen=True, slots=True)
class _Choice:
    """What the greedy rule leaves open."""

    warmup: Sequence[float]
    """For each rank, how many forwards may be unanswered before its first input part."""
    eager: Sequence[float]
    """For each rank, with how many forwards unanswered a weight part goes before a forward."""
    patience: dict[Kind, float]
    """Which share of its duration a forward or weight part may keep an input part waiting: 0 all, 1 none of it."""


def _choices(placement: Placement) -> Iterator[_Choice]:
    depths = [len(placement) - stages_of(placement, rank)[0] for rank in range(max(placement) + 1)]
    warmups = [[slope * depth + more for depth in depths] for slope, more in ((1, 0), (2, -1), (2, 0), (2, 1))]
    eagers = [[slope * depth for depth in depths] for slope in (1.0, 1.25, 1.5, inf)]
    for warmup, eager, f, w in product(warmups, eagers, (0.0, 0.5, 1.0), (0.0, 0.3, 0.6, 1.0)):
        yield _Choice(warmup, eager, {"F": f, "W": w})


@dataclass(slots=True)
class _Rank:
    """Where a rank stands."""

    stages: tuple[int, ...]
    free: float = 0.0
    live: float = 0.0
    started: float | None = None


class _Greedy:
    """One schedule, made action by action in the order of time; microbatches go in ascending order on each stage."""

    def __init__(
        self,
        placement: Placement,
        num_microbatches: int,
        costs: Costs,
        limits: Sequence[float],
        weight_share: float,
        choice: _Choice,
    ) -> None:
        self._placement, self._limits, self._choice, self._costs = placement, limits, choice, costs
        self._m, self._share = num_microbatches, weight_share
        stages = range(len(placement))
        kinds: tuple[Kind, ...] = ("F", "I", "W")
        self._durations = {kind: [costs.of(Action(stage, kind, 0)) for stage in stages] for kind in kinds}
        self._arrivals = {kind: [[inf] * num_microbatches for _ in stages] for kind in kinds}
        self._arrivals["F"][0] = [0.0] * num_microbatches
        self._done = {kind: [0] * len(placement) for kind in kinds}
        self._ranks = [_Rank(stages_of(placement, rank)) for rank in range(max(placement) + 1)]
        self._events = [(0.0, rank) for rank in range(len(self._ranks))]
        self._sequence = list[Action]()

    def run(self) -> tuple[float, list[Action]] | None:
        """The longest span and all actions; None where the limits let nobody go on."""
        while self._events:
            now, number = heappop(self._events)
            if now < self._ranks[number].free:
                continue
            stage, kind, later = self._choose(now, number)
            if kind is not None:
                self._start(now, number, stage, kind)
            elif later < inf:
                heappush(self._events, (later, number))
        if len(self._sequence) < 3 * len(self._placement) * self._m:
            return None
        return max(rank.free - (rank.started or 0.0) for rank in self._ranks), self._sequence

    def _choose(self, now: float, number: int) -> tuple[int, Kind | None, float]:
        """A stage and what it does now; or nothing, and when to look again."""
        rank = self._ranks[number]
        stage, next_input = self._first_input(now, rank)
        if stage is not None:
            return stage, "I", inf
        unanswered = sum(self._done["F"][s] - self._done["I"][s] for s in rank.stages)
        forward, next_forward = self._first_forward(now, number, rank, unanswered)
        weight = min(
            (s for s in rank.stages if self._done["W"][s] < self._done["I"][s]),
            key=self._done["W"].__getitem__,
            default=None,
        )
        later = min(next_input, next_forward)
        is_forward = forward is not None and (weight is None or unanswered < self._choice.eager[number])
        stage = forward if is_forward else weight
        kind: Kind = "F" if is_forward else "W"
        if stage is None:
            return 0, None, later
        is_late = next_input < now + self._durations[kind][stage] * self._choice.patience[kind]
        return stage, None if is_late else kind, later

    def _first_input(self, now: float, rank: _Rank) -> tuple[int | None, float]:
        """The stage whose input part goes first of those that can, or when one can."""
        best, later = None, inf
        for stage in reversed(rank.stages):
            j = self._done["I"][stage]
            if j < self._done["F"][stage]:
                arrival = self._arrivals["I"][stage][j]
                if arrival > now:
                    later = min(later, arrival)
                elif best is None or j < self._done["I"][best]:
                    best = stage
        return best, later

    def _first_forward(self, now: float, number: int, rank: _Rank, unanswered: int) -> tuple[int | None, float]:
        """The last stage of which a forward can go, or when one can; none beyond the limit and the warmup."""
        is_warm = any(self._done["I"][stage] for stage in rank.stages)
        if rank.live + 1 > self._limits[number] + _TOLERANCE:
            return None, inf
        if not is_warm and unanswered >= max(1, self._choice.warmup[number]):
            return None, inf
        later = inf
        for stage in reversed(rank.stages):
            j = self._done["F"][stage]
            if j < self._m:
                arrival = self._arrivals["F"][stage][j]
                if arrival <= now:
                    return stage, inf
                later = min(later, arrival)
        return None, later

    def _start(self, now: float, number: int, stage: int, kind: Kind) -> None:
        rank, j = self._ranks[number], self._done[kind][stage]
        if rank.started is None:
            rank.started = now
        rank.free = now + self._durations[kind][stage]
        rank.live += {"F": 1.0, "I": self._share - 1.0, "W": -self._share}[kind]
        self._done[kind][stage] += 1
        self._sequence.append(Action(stage, kind, j))
        heappush(self._events, (rank.free, number))
        last = len(self._placement) - 1
        if kind == "F" and stage == last:
            self._arrivals["I"][stage][j] = rank.free
        elif kind == "F":
            self._arrive(number, "F", stage + 1, j, rank.free)
        elif kind == "I" and stage:
            self._arrive(number, "I", stage - 1, j, rank.free)

    def _arrive(self, source: int, kind: Kind, stage: int, microbatch: int, sent: float) -> None:
        to = self._placement[stage]
        arrival = self._arrivals[kind][stage][microbatch] = sent + self._costs.between(source, to)
        heappush(self._events, (max(arrival, self._ranks[to].free), to))
