"""Schedules as pictures: one row a rank, `F0 F1 .  B0`, bubbles as dots; `2F0` where a rank has several stages.

Rows of a docstring begin with `stage 0` or `rank 0`, and may have words behind the cells.
"""

from __future__ import annotations

import re

from pptrain.schedule import Action, Kind, Placement, Schedule, loop


def read(picture: str, placement: Placement | None = None) -> Schedule:
    """The schedule that a picture shows, one stage a rank unless said otherwise."""
    actions = tuple(
        tuple(action(cell, rank) for cell in cells if cell != ".") for rank, cells in enumerate(rows(picture))
    )
    num_microbatches = len({action.microbatch for row in actions for action in row})
    return Schedule("picture", num_microbatches, placement or loop(len(actions)), actions)


def rows(picture: str) -> list[list[str]]:
    """The cells of each row that begins with `stage` or `rank`, or of every row if none does; no dots at the end."""
    lines = [line.strip() for line in picture.strip().splitlines()]
    marked = [re.sub(r"^(stage|rank) \d+ +", "", line) for line in lines if re.match(r"(stage|rank) \d", line)]
    return [_cells(line) for line in marked or lines]


def action(cell: str, stage: int = 0) -> Action:
    """`2F0`, or `F0` of the stage that is given."""
    before, kind, microbatch = re.fullmatch(r"(\d*)([FBIW])(\d+)", cell).groups()  # pyright: ignore
    named: Kind = kind
    return Action(int(before) if before else stage, named, int(microbatch))


def _cells(line: str) -> list[str]:
    cells = list[str]()
    for cell in line.split():
        if not re.fullmatch(r"\.|\d*[FBIW]\d+", cell):
            break
        cells.append(cell)
    while cells and cells[-1] == ".":
        cells.pop()
    return cells
