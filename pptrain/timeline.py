"""What ran: drawn with one row a rank, one column a slot and bubbles as dots; and when, on one clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np

from pptrain.pipeline import Pipeline
from pptrain.schedule import Action, Schedule
from pptrain.simulate import Costs, Span, simulate
from transports import Task, Transport

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


def on_one_clock(pipeline: Pipeline) -> dict[int, list[Span]]:
    """What every rank ran in the last step, in seconds on one clock; every rank calls this.

    Ranks read their clocks when they have all come to one place, so that clocks are told apart to within the time that
    it takes to leave there: some microseconds on one machine, a round trip between several.
    """
    return pipeline.run(lambda transport: _collect(transport, pipeline))[0]


def _collect(transport: Transport, pipeline: Pipeline) -> Task[dict[int, list[Span]]]:
    yield transport.barrier()
    now, actions = transport.clock(), [[i for i in program if isinstance(i, Action)] for program in pipeline.ran]
    table = np.zeros((len(actions), max(map(len, actions), default=0), 2), np.int32)
    for place, span in enumerate(pipeline.spans[transport.rank]):
        table[transport.rank, place] = [round((time - now) * 1e6) for time in (span.start, span.end)]
    # Each row is filled by one rank and zero on the others: the sum is everybody's times.
    everybody = transport.all_sum(mx.array(table), "times of the last step")
    yield everybody
    times = np.asarray(everybody.array) / 1e6
    return {
        rank: [Span(action, *times[rank, place].tolist()) for place, action in enumerate(row)]
        for rank, row in enumerate(actions)
    }


def _cell(action: Action) -> str:
    return f"{action.kind}{action.microbatch}"
