"""Schedules as pictures: one row a stage, `F0 F1 .  B0`, bubbles as dots.

Rows of a docstring begin with `stage 0`, and may have words behind the cells.
"""

from __future__ import annotations

import re

from pptrain.schedule import Action, Kind


def read(picture: str) -> list[list[Action]]:
    """The actions of each row, in order."""
    return [[_action(stage, cell) for cell in cells if cell != "."] for stage, cells in enumerate(rows(picture))]


def rows(picture: str) -> list[list[str]]:
    """The cells of each row that begins with `stage`, or of every row if none does; dots at the end are dropped."""
    lines = [line.strip() for line in picture.strip().splitlines()]
    marked = [re.sub(r"^stage \d+ +", "", line) for line in lines if line.startswith("stage ")]
    return [_cells(line) for line in marked or lines]


def _cells(line: str) -> list[str]:
    cells = list[str]()
    for cell in line.split():
        if not re.fullmatch(r"\.|[FBIW]\d+", cell):
            break
        cells.append(cell)
    while cells and cells[-1] == ".":
        cells.pop()
    return cells


def _action(stage: int, cell: str) -> Action:
    kind: Kind = cell[0]  # pyright: ignore[reportAssignmentType]
    return Action(stage, kind, int(cell[1:]))
