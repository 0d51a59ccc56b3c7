"""Draws what ran: one row a stage, one column a slot, bubbles as dots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pptrain.schedule import Action, Kind, Span, spans

_SLOTS: Mapping[Kind, float] = {"F": 1.0, "B": 1.0, "I": 1.0, "W": 1.0}


def draw(lists: Sequence[Sequence[Action]], num_stages: int) -> str:
    """The order in which actions ran, each in one slot, as early as what it needs allows::

        stage 0   F0 F1 .  .  B0 B1
        stage 1   .  F0 F1 B0 B1 .

    Args:
        lists: Each rank's actions, in the order that they ran.
        num_stages: How many stages there are.
    """
    placed = spans(lists, num_stages, _SLOTS)
    length = int(max((span.end for span in placed), default=0))
    width = max((len(_cell(span.action)) for span in placed), default=1)
    rows = [["."] * length for _ in range(num_stages)]
    for span in placed:
        rows[span.action.stage][int(span.start)] = _cell(span.action)
    return "\n".join(
        f"stage {stage:<3} {' '.join(cell.ljust(width) for cell in row)}".rstrip() for stage, row in enumerate(rows)
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
