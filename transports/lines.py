"""Which communication of a rank must not overtake which: the one rule of order that all transports share.

An operation is *in line* behind an earlier one of its rank if it may not begin before that one is over::

    single         everything is in one line, in the order of the program
    directional    one line for each peer and direction; a collective is in line behind and before everything
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, TypeVar

from transports.base import Lanes

Lane = tuple[str, int]
"""What an operation keeps in line with: `("to", 1)`, `("from", 2)`, or `COLLECTIVE`."""

COLLECTIVE: Lane = ("all", -1)


class InLine(Protocol):
    """An operation that has a lane."""

    @property
    def lane(self) -> Lane:
        """The lane of the operation."""
        ...


Op = TypeVar("Op", bound=InLine)


def is_behind(later: InLine, earlier: InLine, lanes: Lanes) -> bool:
    """Whether a later operation of a rank has to wait until an earlier one is over."""
    return lanes == "single" or earlier.lane == later.lane or COLLECTIVE in (earlier.lane, later.lane)


def first_in_line(pending: Sequence[Op], lanes: Lanes) -> list[Op]:
    """The operations that no earlier one holds back."""
    return [op for i, op in enumerate(pending) if not any(is_behind(op, earlier, lanes) for earlier in pending[:i])]


def needed(pending: Sequence[Op], targets: Collection[Op], lanes: Lanes) -> list[Op]:
    """The pending targets and all that they are in line behind, in the order of the program."""
    found: list[Op] = []
    for op in reversed(pending):
        if op in targets or any(is_behind(later, op, lanes) for later in found):
            found.append(op)
    return found[::-1]
