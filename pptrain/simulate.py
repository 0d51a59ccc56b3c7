"""The one timer: when every action of a schedule runs, from what each costs and how long a message travels.

Every rank runs its list in order, each action as early as what it needs allows. Times are in the unit of the costs.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from pptrain.errors import ScheduleError
from pptrain.schedule import Action, Kind, Schedule, needs

Durations = Mapping[Kind, float]
"""What each kind costs; a whole `B` costs `I` and `W` together where it is not given."""

Link = tuple[int, int]
"""From which rank to which."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What a schedule is timed with."""

    durations: Durations | Sequence[Durations] = field(default_factory=lambda: {"F": 1.0, "I": 1.0, "W": 1.0})
    """Of every stage, or of each stage. Unmeasured, both parts of a backward cost as much as a forward."""
    link: float | Mapping[Link, float] = 0.0
    """How much later another rank has what an action hands it; of every link, or of each."""

    def of(self, action: Action) -> float:
        """How long an action runs."""
        durations = self.durations if isinstance(self.durations, Mapping) else self.durations[action.stage]
        if action.kind == "B" and "B" not in durations:
            return durations["I"] + durations["W"]
        return durations[action.kind]

    def between(self, source: int, to: int) -> float:
        """How long a message travels; nothing from a rank to itself."""
        if source == to:
            return 0.0
        return self.link[source, to] if isinstance(self.link, Mapping) else self.link


def travel_time(boundary_bytes: float, latency: float, bytes_per_second: float) -> float:
    """How long a boundary travels over a link, in the unit of the latency, which is seconds."""
    return latency + boundary_bytes / bytes_per_second


@dataclass(frozen=True, slots=True)
class Span:
    """When an action ran, in any unit of time."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timing:
    """When everything ran, and what follows from it."""

    schedule: Schedule
    costs: Costs
    spans: tuple[Span, ...]
    """Ordered by start."""

    @cached_property
    def makespan(self) -> float:
        """From the start of the first action to the end of the last."""
        return max((span.end for span in self.spans), default=0.0)

    @cached_property
    def longest_span(self) -> float:
        """The most that one rank takes from its first start to its last end."""
        return max((own[-1].end - own[0].start for own in self._by_rank if own), default=0.0)

    @cached_property
    def bubble(self) -> float:
        """The share of the longest span that is not work: `(T - m(F + I + W)) / T`, as the published tables count it.

        Where ranks have different work, that of the busiest.
        """
        work = max(sum(self.costs.of(span.action) for span in own) for own in self._by_rank)
        return (self.longest_span - work) / self.longest_span if self.longest_span else 0.0

    @cached_property
    def residuals(self) -> tuple[tuple[tuple[float, int], ...], ...]:
        """For each rank, when its live residuals change and to how many, counted in stages times microbatches.

        They live from the start of a forward to the end of the whole backward, or of its weight part.
        """
        return tuple(_live(own) for own in self._by_rank)

    @cached_property
    def most_residuals(self) -> tuple[int, ...]:
        """The most that each rank holds at a time."""
        return tuple(max((live for _, live in changes), default=0) for changes in self.residuals)

    @cached_property
    def link_use(self) -> dict[Link, float]:
        """For each link that carries anything, the share of the makespan in which a message is under way on it."""
        placement, busy = self.schedule.placement, defaultdict[Link, float](float)
        for span in self.spans:
            stage = span.action.stage
            to = {"F": stage + 1, "B": stage - 1, "I": stage - 1, "W": stage}[span.action.kind]
            if 0 <= to < len(placement) and placement[to] != placement[stage]:
                link = placement[stage], placement[to]
                busy[link] += self.costs.between(*link)
        return {link: time / self.makespan for link, time in sorted(busy.items())}

    @cached_property
    def _by_rank(self) -> list[list[Span]]:
        rows: list[list[Span]] = [[] for _ in self.schedule.actions]
        for span in self.spans:
            rows[self.schedule.placement[span.action.stage]].append(span)
        return rows


def simulate(schedule: Schedule, costs: Costs = Costs()) -> Timing:
    """Time a schedule: its spans, makespan, bubble, residuals and links.

    Raises:
        ScheduleError: If some rank cannot go on: an action waits for one that never comes, or that stands behind it.
    """
    placement, lists = schedule.placement, schedule.actions
    every = {action for actions in lists for action in actions}
    ends, free, heads = dict[Action, float](), [0.0] * len(lists), [0] * len(lists)
    spans, waiting, runnable = list[Span](), dict[Action, list[int]](), deque(range(len(lists)))
    while runnable:
        rank = runnable.popleft()
        while heads[rank] < len(lists[rank]):
            action = lists[rank][heads[rank]]
            before = needs(action, len(placement), every)
            missing = next((needed for needed in before if needed not in ends), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            arrived = [ends[needed] + costs.between(placement[needed.stage], rank) for needed in before]
            start = max([free[rank], *arrived])
            free[rank] = ends[action] = start + costs.of(action)
            spans.append(Span(action, start, free[rank]))
            heads[rank] += 1
            runnable.extend(waiting.pop(action, ()))
    if any(head < len(actions) for head, actions in zip(heads, lists, strict=True)):
        raise ScheduleError(_stuck(lists, heads))
    spans.sort(key=lambda span: (span.start, placement[span.action.stage]))
    return Timing(schedule, costs, tuple(spans))


def _live(own: Sequence[Span]) -> tuple[tuple[float, int], ...]:
    counted = [span for span in own if span.action.kind != "I"]
    changes = [(span.start, 1) if span.action.kind == "F" else (span.end, -1) for span in counted]
    return tuple(zip((time for time, _ in changes), accumulate(change for _, change in changes), strict=True))


def _stuck(lists: Sequence[Sequence[Action]], heads: Sequence[int]) -> str:
    stand = [
        f"rank {r} stands at {actions[h]} (action {h})"
        for r, (actions, h) in enumerate(zip(lists, heads, strict=True))
        if h < len(actions)
    ]
    return (
        "[schedule] No rank can go on:\n  " + "\n  ".join(stand) + "\nEvery action needs those before it to have run."
    )
