"""What can be made to go wrong in a simulated world: data only, whose `repr` is the line that makes it go wrong again.

Everything is counted from 0 and over the whole life of the world: the messages of each directed link, and of each rank
its communications (`send`, `arrive` and `all_sum`, in the order of the calls) and its instructions (`stand_at`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

When = Literal["before", "in", "after"]
Part = Literal["communication", "instruction"]
How = Literal["cut", "flip", "double", "shape"]


@dataclass(frozen=True, slots=True)
class Dies:
    """A rank ends, as if its process were killed.

    ==========  =========================================  ======================================
    when        communication                              instruction
    ==========  =========================================  ======================================
    `before`    at the call; nothing of it leaves          before any of its time has passed
    `in`        it could be over now, but is lost instead  when half of its given time has passed
    `after`     when it is over                            at the next one, or at the task's end
    ==========  =========================================  ======================================
    """

    rank: int
    when: When
    part: Part
    number: int

    def __str__(self) -> str:
        return f"died {self.when} its {self.part} {self.number}"


@dataclass(frozen=True, slots=True)
class Stalls:
    """A link stands still before it carries one of its messages: that one and all after it come later, or never."""

    source: int
    to: int
    message: int
    seconds: float | None = None
    """None for ever."""


@dataclass(frozen=True, slots=True)
class Damages:
    """A message comes other than it was sent.

    `cut` loses the second half of its bytes, `flip` has one bit turned, `double` comes twice, and `shape` claims to
    have one more dimension. An empty message has nothing to cut or to flip.
    """

    source: int
    to: int
    message: int
    how: How
    bit: int = 0
    """Which bit `flip` turns, counted from the first byte's lowest, and round again at the message's end."""


Fault = Dies | Stalls | Damages
