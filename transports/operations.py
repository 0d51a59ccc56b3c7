"""What a simulated rank can be waiting for, and the links that its messages take.

Times are seconds on the ranks' virtual clocks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from transports.base import Receive, Sum, Wait
from transports.buffers import Bytes, array_from, bytes_of, poisoned
from transports.lines import COLLECTIVE, Lane


def form(shape: Sequence[int], dtype: mx.Dtype) -> str:
    """Shape and dtype in words: `float32 (2, 3)`."""
    return f"{str(dtype).removeprefix('mlx.core.')} {tuple(shape)}"


@dataclass(frozen=True, slots=True)
class Message:
    """A copy of an array's values."""

    data: Bytes
    shape: tuple[int, ...]
    dtype: mx.Dtype
    label: str

    @classmethod
    def of(cls, array: mx.array, label: str) -> Message:
        """Evaluate an array and copy its values."""
        return cls(bytes_of(array), tuple(array.shape), array.dtype, label)

    def array(self) -> mx.array:
        """A new array with these values."""
        return array_from(self.data, self.shape, self.dtype)

    @property
    def form(self) -> str:
        """Shape and dtype in words: `float32 (2, 3)`."""
        return form(self.shape, self.dtype)


class Link:
    """One direction between two ranks: the messages under way, and since when each free slot has been free.

    Args:
        capacity: How many messages can be under way; None for any number, 0 for a rendezvous.
    """

    def __init__(self, capacity: int | None) -> None:
        self.is_rendezvous = capacity == 0
        self.wire: deque[tuple[Message, float]] = deque()
        self._free_since = None if capacity is None else deque([0.0] * capacity)

    def has_room(self) -> bool:
        """Whether another message can get under way."""
        return self._free_since is None or bool(self._free_since)

    def put(self, message: Message, at: float) -> float:
        """Put a message on the wire; returns when it left, which is later than `at` if it had to wait for room."""
        left_at = at if self._free_since is None else max(at, self._free_since.popleft())
        self.wire.append((message, left_at))
        return left_at

    def take(self, at: float) -> tuple[Message, float]:
        """Take the oldest message off the wire; returns it, and when a rank that came at `at` had it."""
        message, left_at = self.wire.popleft()
        taken_at = max(at, left_at)
        if self._free_since is not None:
            self._free_since.append(taken_at)
        return message, taken_at


class Operation(Wait):
    """Something that a rank asked for at `ready_at`; over once `over_at` says when."""

    def __init__(self, ready_at: float, lane: Lane, label: str) -> None:
        self.ready_at = ready_at
        self.lane = lane
        self.label = label
        self.over_at: float | None = None

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


class Collective(Operation, Sum):
    """A sum that not every rank has come to yet."""

    def __init__(self, ready_at: float, addend: Message) -> None:
        super().__init__(ready_at, COLLECTIVE, addend.label)
        self.addend = addend
        self.array = poisoned(addend.shape, addend.dtype)

    def describe(self) -> str:
        """What is being waited for: `every rank to come to the norm`."""
        return f"every rank to come to {self.label or 'an all_sum'}"


class Flush(Operation):
    """The wait for a rank's own sends; never in line itself."""

    def __init__(self, ready_at: float, sends: Sequence[Operation]) -> None:
        super().__init__(ready_at, ("flush", -1), "flush")
        self._sends = sends

    def needs(self) -> Sequence[Operation]:
        """The sends that had been asked for when this was."""
        return self._sends

    def describe(self) -> str:
        """What is being waited for: the sends that have not left."""
        return ", ".join(send.describe() for send in self._sends if send.over_at is None)
