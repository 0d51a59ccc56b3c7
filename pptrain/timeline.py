"""Draws what ran: one row a rank, one column a slot, bubbles as dots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pptrain.schedule import Action, Schedule
from pptrain.simulate import Costs, Span, simulate

_SLOTS = Costs({"F": 1.0, "B": 1.0, "I": 1.0, "W": 1.0})


def draw(schedule: Schedule) -> str:
    """The order in which actions ran, each in one slot, as early as what it needs allows::

        stage 0   F0 F1 .  .  B0 B1
        stage 1   .  F0 F1 B0 B1 .

    Where ranks hold several stages, a row is a rank and a cell has its stage in front, as `3F0`.
    """
    is_one_each = schedule.num_stages == schedule.num_ranks
    placed = simulate(schedule, _SLOTS)
    length = int(placed.makespan)
    rows = [["."] * length for _ in range(schedule.num_ranks)]
    for span in placed.spans:
        action = span.action
        rows[schedule.placement[action.stage]][int(span.start)] = _cell(action) if is_one_each else str(action)
    width = max((len(cell) for row in rows for cell in row), default=1)
    noun = "stage" if is_one_each else "rank"
    return "\n".join(
        f"{noun} {number:<3} {' '.join(cell.ljust(width) for cell in row)}".rstrip() for number, row in enumerate(rows)
    )


def bubble_share(ran: Mapping[int, Sequence[Span]]) -> float:
    """The share of time in which a rank waited, over all ranks, between the first start and the last end.

    Args:
        ran: What each rank ran, and when by its own clock.
    """
    everything = [span for spans_of_rank in ran.values() for span in spans_of_rank]
    if not everything:
        return 0.0
    length = max(span.end for span in everything) - min(span.start for span in everything)
    busy = sum(span.end - span.start for span in everything)
    return 1 - busy / (length * len(ran)) if length > 0 else 0.0


def _cell(action: Action) -> str:
    return f"{action.kind}{action.microbatch}"
