"""The links of a simulated world: where they lead, and what becomes of a message on its way.

Times are seconds on the ranks' virtual clocks. A message of n bytes that begins at t::

    t ──────────────────> left: t + n / bandwidth ──────> there: left + latency
      when what it is in      a single lane goes on;        the receiver has it, if it
      line behind is over,    the next message may          has come to wait for it by then
      and there is room       begin
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import mlx.core as mx
import numpy as np

from transports.buffers import Bytes, array_from, bytes_of
from transports.faults import Damages, Stalls
from transports.header import HEADER_BYTES, Header, dtype_name

Topology = Literal["mesh", "ring", "line"]
"""`mesh`: everybody with everybody. `ring`: with the ranks before and after, all the way round. `line`: not round."""


def neighbours(rank: int, world_size: int, topology: Topology) -> list[int]:
    """The ranks that a rank's links lead to."""
    match topology:
        case "mesh":
            return [other for other in range(world_size) if other != rank]
        case "ring":
            return sorted({(rank - 1) % world_size, (rank + 1) % world_size} - {rank})
        case "line":
            return [other for other in (rank - 1, rank + 1) if 0 <= other < world_size]
        case _:
            raise ValueError(f"There is no topology {topology!r}. There are: mesh, ring, line.")


def form(shape: Sequence[int], dtype: mx.Dtype) -> str:
    """Shape and dtype in words: `float32 (2, 3)`."""
    return f"{dtype_name(dtype)} {tuple(shape)}"


@dataclass(frozen=True, slots=True)
class Message:
    """A copy of an array's values."""

    data: Bytes
    shape: tuple[int, ...]
    dtype: mx.Dtype
    label: str
    header: Header | None = None
    """In checked mode, from when it is on its link."""

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

    def damaged(self, damage: Damages) -> list[Message]:
        """The messages that come instead of this one."""
        match damage.how:
            case "cut":
                return [replace(self, data=self.data[: self.data.size // 2])]
            case "flip":
                return [replace(self, data=_flipped(self.data, damage.bit))]
            case "double":
                return [self, self]
            case "shape":
                shape = (1, *self.shape)
                header = None if self.header is None else replace(self.header, shape=shape)
                return [replace(self, shape=shape, header=header)]
            case _:
                raise ValueError(f"A message cannot be damaged by {damage.how!r}.")


def _flipped(data: Bytes, bit: int) -> Bytes:
    flipped = data.copy()
    if flipped.size:
        flipped[bit // 8 % flipped.size] ^= np.uint8(1 << bit % 8)
    return flipped


@dataclass(frozen=True, slots=True)
class Carried:
    """A message on its link."""

    message: Message
    there_at: float
    holds_slot: bool


class Link:
    """One direction between two ranks: the messages under way, and since when each free slot has been free.

    Args:
        capacity: How many messages can be under way; None for any number, 0 for a rendezvous.
        latency_seconds: How long a message takes after it has left.
        bandwidth_bytes_per_second: How fast it leaves; None for at once.
        faults: What this link does to its messages.
        is_checked: Whether each message carries a header.
    """

    def __init__(
        self,
        capacity: int | None,
        latency_seconds: float = 0.0,
        bandwidth_bytes_per_second: float | None = None,
        faults: Sequence[Stalls | Damages] = (),
        is_checked: bool = False,
    ) -> None:
        self.is_rendezvous = capacity == 0
        self.wire: deque[Carried] = deque()
        self.num_carried = 0
        self.num_taken = 0
        self._free_since = None if capacity is None else deque([0.0] * capacity)
        self._latency_seconds = latency_seconds
        self._bandwidth = bandwidth_bytes_per_second
        self._faults = faults
        self._is_checked = is_checked

    def has_room(self) -> bool:
        """Whether another message can get under way; on a rendezvous, whether there is nothing left of the last."""
        if self.is_rendezvous:
            return not self.wire
        return self._free_since is None or bool(self._free_since)

    def stands_still(self) -> bool:
        """Whether this link will never carry another message."""
        return any(stall.seconds is None for stall in self._stalls())

    def crossing_seconds(self, num_bytes: int) -> float:
        """How long so many bytes of a sum take from one end to the other."""
        return self._leaving_seconds(num_bytes) + self._latency_seconds

    def carry(self, message: Message, at: float) -> float:
        """Put a message on its way; returns when it left, which is later than `at` if it had to wait for room."""
        slot = 0.0 if self.is_rendezvous or self._free_since is None else self._free_since.popleft()
        begun_at = max(at, slot) + sum(stall.seconds or 0.0 for stall in self._stalls())
        if self._is_checked:
            header = Header.of(self.num_carried, message.label, message.shape, message.dtype, message.data)
            message = replace(message, header=header)
        num_bytes = message.data.size + (HEADER_BYTES if self._is_checked else 0)
        left_at = begun_at + self._leaving_seconds(num_bytes)
        for place, each in enumerate(self._what_comes_of(message)):
            holds_slot = place == 0 and not self.is_rendezvous
            self.wire.append(Carried(each, left_at + self._latency_seconds, holds_slot))
        self.num_carried += 1
        return left_at

    def take(self, at: float) -> tuple[Message, float]:
        """Take the oldest message off the wire; returns it, and when a rank that came at `at` had it."""
        carried = self.wire.popleft()
        self.num_taken += 1
        taken_at = max(at, carried.there_at)
        if self._free_since is not None and carried.holds_slot:
            self._free_since.append(taken_at)
        return carried.message, taken_at

    def faults_ahead(self) -> list[Stalls | Damages]:
        """What will happen to the next message."""
        return [fault for fault in self._faults if fault.message == self.num_carried]

    def _stalls(self) -> list[Stalls]:
        return [fault for fault in self.faults_ahead() if isinstance(fault, Stalls)]

    def _leaving_seconds(self, num_bytes: int) -> float:
        return 0.0 if self._bandwidth is None else num_bytes / self._bandwidth

    def _what_comes_of(self, message: Message) -> list[Message]:
        messages = [message]
        for fault in self.faults_ahead():
            if isinstance(fault, Damages):
                messages = [damaged for each in messages for damaged in each.damaged(fault)]
        return messages
