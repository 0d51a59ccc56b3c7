"""Schedules as CSV in torch's notation: one row a rank, `0F0,0F1,0I0,0W0`, an empty cell for a bubble."""

from __future__ import annotations

import csv
import re
from io import StringIO
from typing import cast

from pptrain.errors import ScheduleError
from pptrain.schedule import Action, Kind, Placement, Schedule


def read_csv(text: str, name: str = "custom") -> Schedule:
    """The schedule that a CSV file says; which rank has which stages is seen from its actions.

    Whether it can be run is for `simulate` to find.

    Raises:
        ScheduleError: If a cell is no action, or a stage is missing or stands on two ranks.
    """
    rows = tuple(
        tuple(_action(cell.strip(), rank, column) for column, cell in enumerate(row) if cell.strip())
        for rank, row in enumerate(row for row in csv.reader(StringIO(text)) if row)
    )
    microbatches = {action.microbatch for row in rows for action in row}
    return Schedule(name, len(microbatches), _placement(rows), rows)


def write_csv(schedule: Schedule) -> str:
    """A schedule as `read_csv` takes it, without bubbles."""
    return "".join(",".join(map(str, actions)) + "\n" for actions in schedule.actions)


def _action(cell: str, rank: int, column: int) -> Action:
    found = re.fullmatch(r"(\d+)([FBIW])(\d+)", cell)
    if not found:
        raise ScheduleError(
            f"[csv] Row {rank + 1}, cell {column + 1} is {cell!r}. Expected a stage, one of F, B, I, W, and a "
            "microbatch, such as 0F0, or nothing for a bubble."
        )
    stage, kind, microbatch = found.groups()
    return Action(int(stage), cast(Kind, kind), int(microbatch))


def _placement(rows: tuple[tuple[Action, ...], ...]) -> Placement:
    ranks = dict[int, int]()
    for rank, row in enumerate(rows):
        for action in row:
            if ranks.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f"[csv] {action} stands in row {rank + 1}, but stage {action.stage} is rank {ranks[action.stage]}'s"
                    f" (row {ranks[action.stage] + 1}). Expected each stage in one row."
                )
    missing = [stage for stage in range(max(ranks, default=0) + 1) if stage not in ranks]
    if missing:
        raise ScheduleError(f"[csv] Stage {missing[0]} has no action. Expected every stage from 0 to the last.")
    return tuple(ranks[stage] for stage in range(len(ranks)))
