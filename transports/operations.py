"""What a simulated rank can be waiting for.

Times are seconds on the ranks' virtual clocks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from transports.base import Receive, Sum, Wait
from transports.buffers import byte_count, poisoned
from transports.errors import BoundaryMismatch, DamagedMessage, TransportError
from transports.header import damage, mismatch
from transports.lines import COLLECTIVE, Lane
from transports.links import Message, form


@dataclass(frozen=True, slots=True)
class Done:
    """When the last operation of a lane was over, by virtual time: which can be later than its rank's own clock."""

    lane: Lane
    at: float


class Operation(Wait):
    """Something that a rank asked for at `ready_at`; over once `over_at` says when."""

    def __init__(self, ready_at: float, lane: Lane, label: str) -> None:
        self.ready_at = ready_at
        self.lane = lane
        self.label = label
        self.over_at: float | None = None
        self.number = -1  # Which of its rank's communications this is; waits that are none have no number.

    @abstractmethod
    def describe(self) -> str:
        """What is being waited for, in words; see `Wait.describe`."""

    def needs(self) -> Sequence[Operation]:
        """The operations that must be over before this wait is."""
        return [self]

    def is_over(self) -> bool:
        """Whether the rank that waits for this can go on."""
        return all(operation.over_at is not None for operation in self.needs())

    def when(self) -> float:
        """When this was over."""
        return max((operation.over_at or 0.0 for operation in self.needs()), default=0.0)


class Send(Operation):
    """A message that has not left yet."""

    def __init__(self, ready_at: float, to: int, message: Message) -> None:
        super().__init__(ready_at, ("to", to), message.label)
        self.to = to
        self.message = message

    def describe(self) -> str:
        """What is being waited for: `0F2 to leave for rank 1`."""
        return f"{self.label or 'a message'} to leave for rank {self.to}"


@dataclass(slots=True)
class BufferReceive(Receive):
    """An evaluated buffer, poisoned until the message is copied into it."""

    array: mx.array
    source: int
    label: str
    is_asked_for: bool = False


class Arrive(Operation):
    """A message that has not come yet."""

    def __init__(self, ready_at: float, receive: BufferReceive) -> None:
        super().__init__(ready_at, ("from", receive.source), receive.label)
        self.receive = receive

    def describe(self) -> str:
        """What is being waited for: `1B0 from rank 1`."""
        return f"{self.label or 'a message'} from rank {self.receive.source}"

    def refusal(self, message: Message, sequence: int, where: str) -> TransportError | None:
        """Why a message cannot be what this waits for, if it cannot.

        Args:
            message: What has come.
            sequence: How many have come on this link before it.
            where: What the error's message begins with.
        """
        array, header = self.receive.array, message.header
        came = f"{where} {message.label or 'a message'} from rank {self.receive.source}:"
        if header is not None:
            if text := mismatch(header, sequence, self.label, array.shape, array.dtype):
                return BoundaryMismatch(f"{came} {text}. Do both ranks run the same program?")
            if text := damage(header, message.data):
                return DamagedMessage(f"{came} {text}.")
        if message.form != form(array.shape, array.dtype):
            return BoundaryMismatch(
                f"{where} rank {self.receive.source} sent {message.label or 'a message'} as {message.form}, but "
                f"{self.label or 'this receive'} expects {form(array.shape, array.dtype)}. "
                f"Do both ranks use the same microbatch size and dtype?"
            )
        if message.data.size != (expected := byte_count(array.shape, array.dtype)):
            return DamagedMessage(f"{came} it came with {message.data.size} bytes, and was sent with {expected}.")
        return None


class Collective(Operation, Sum):
    """A sum that not every rank has come to yet."""

    def __init__(self, ready_at: float, addend: Message) -> None:
        super().__init__(ready_at, COLLECTIVE, addend.label)
        self.addend = addend
        self.array = poisoned(addend.shape, addend.dtype)
        self.last_rank: int | None = None

    def describe(self) -> str:
        """What is being waited for: `every rank to come to the norm`, and who came last if all have."""
        last = "" if self.last_rank is None else f", of which rank {self.last_rank} came last"
        return f"every rank to come to {self.label or 'an all_sum'}{last}"


class Flush(Operation):
    """The wait for a rank's own sends; never in line itself.

    Args:
        ready_at: When it was asked for.
        sends: The sends that had not moved then.
        last: The one of those that had moved which leaves last.
    """

    def __init__(self, ready_at: float, sends: Sequence[Operation], last: Done | None = None) -> None:
        super().__init__(ready_at, ("flush", -1), "flush")
        self._sends = sends
        self._last = last

    def needs(self) -> Sequence[Operation]:
        """The sends that had been asked for when this was."""
        return self._sends

    def when(self) -> float:
        """When this was over."""
        return max(self._last.at if self._last else 0.0, super().when())

    def describe(self) -> str:
        """What is being waited for: the sends that have not left, or all if only their time is not over."""
        left = [send for send in self._sends if send.over_at is None]
        where = f" for rank {self._last.lane[1]}" if self._last else ""
        return ", ".join(send.describe() for send in left or self._sends) or f"its sends to leave{where}"
