"""The interface that every transport keeps, and its law.

A rank talks to its peers through one `Transport`. Whatever can take time is asked for first and waited for by
**yielding** the `Wait` that was returned, so that one and the same generator runs in a simulated world, where the world
decides who goes on, and over processes, where a wait blocks::

    sent = transport.send(activation, to=1, label="0F2")
    yield sent
    cotangent = transport.receive((2, 16, 64), mx.bfloat16, source=1, label="1B2")  # an array now, its data later
    ...                                                                             # build a graph with cotangent.array
    yield transport.arrive(cotangent)                                               # now its data are there

The law:

1. Messages of one directed link arrive in the order of their `send` calls. The k-th `arrive` on a link takes the k-th
   message; the order in which receives were *built* means nothing.
2. `send` takes the array's value at the call: a lazy array is evaluated once, and the caller may drop or change its own
   afterwards (by MLX: what is written into its memory by the buffer protocol may be sent). A send whose wait is dropped
   is still sent.
3. `Receive.array` may be built into a graph at once. It must not be evaluated before its wait is over.
4. A receive of another shape or dtype than the message is an error on the receiver, never other data, wherever the
   transport can know (the loopback always; tagless links in checked mode).
5. `all_sum` and `barrier` are called by every rank in the same order, and go through the same queue as messages: what
   was sent before one must be asked for with `arrive` before the same one, or a tagless link would read it as the sum.
6. After its first error a transport is closed: it touches the wire no more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from typing import Literal, TypeVar

import mlx.core as mx

Lanes = Literal["single", "directional"]
"""`single`: each rank does one communication at a time, in program order. `directional`: sends leave by themselves."""

T = TypeVar("T")


class Wait(ABC):
    """Something that is over later; a rank's generator yields it, and is resumed when it is over."""

    @abstractmethod
    def describe(self) -> str:
        """What is being waited for, in words: `1B0 from rank 1`."""


class Receive(ABC):
    """A message that will come: its array can be built into a graph before the data are there."""

    array: mx.array
    """The message, in the shape and dtype asked for. Not to be evaluated before the wait of `arrive` is over."""


class Sum(Wait):
    """The wait of an `all_sum`; `array` holds the sum once it is over."""

    array: mx.array


Task = Generator[Wait, None, T]
"""A rank's program: yields each wait, is resumed when it is over, returns its result."""


class Transport(ABC):
    """One rank's end of the wire."""

    rank: int
    world_size: int
    lanes: Lanes
    checks_messages: bool = False
    """Whether a message is compared with what its receiver expects, beyond what the link itself can know."""

    @abstractmethod
    def send(self, array: mx.array, to: int, label: str = "") -> Wait:
        """Hand an array to the transport, which owns it from here on.

        Args:
            array: Any shape and dtype, lazy or not; its value at this call is what is sent.
            to: The receiving rank.
            label: What the message is, for reports: `0F2`.

        Returns:
            A wait that is over at once with directional lanes, and when the message has left with a single lane.

        Raises:
            TransportClosed: If this end is closed.
            TransportError: If no link leads to that rank.
        """

    @abstractmethod
    def receive(self, shape: Sequence[int], dtype: mx.Dtype, source: int, label: str = "") -> Receive:
        """Make the array of a message that will come. Nothing is taken from the wire before `arrive`."""

    @abstractmethod
    def arrive(self, receive: Receive) -> Wait:
        """Take the next message of the link into this receive; over when its data are there."""

    @abstractmethod
    def all_sum(self, array: mx.array, label: str = "") -> Sum:
        """Sum an array over all ranks, in an order that is the same on all of them."""

    @abstractmethod
    def flush(self) -> Wait:
        """A wait that is over when everything that this rank has sent has left it."""

    @abstractmethod
    def clock(self) -> float:
        """Seconds on this rank's clock; only differences mean anything."""

    @abstractmethod
    def stand_at(self, position: str) -> None:
        """Say which instruction comes next, so that a report can tell where this rank stood."""

    @abstractmethod
    def close(self) -> None:
        """Deliver what was sent, then end. Closing twice is fine."""

    def barrier(self) -> Wait:
        """A wait that is over when every rank has come here."""
        return self.all_sum(mx.zeros((1,), dtype=mx.int32), label="barrier")


class World(ABC):
    """All ranks of a run, of which this process runs some: every one in the loopback, one over processes."""

    world_size: int
    local_ranks: tuple[int, ...]

    @abstractmethod
    def transport(self, rank: int) -> Transport:
        """The transport of a local rank."""

    @abstractmethod
    def run(self, tasks: Mapping[int, Task[T]]) -> dict[int, T]:
        """Run one task for each local rank to its end, and return what each returned.

        Raises:
            TransportError: What went wrong on the wire.
            Exception: Whatever a task raised.
        """

    def fail(self, error: BaseException) -> None:
        """Let the other ranks know that this process ends by an error outside a run; here nobody else is there."""
        self.close()

    def leave_signals(self, count: int) -> None:  # noqa: B027  # a world in one process has no thread that hears them
        """Leave the next SIGINTs to the program's own handler: by itself a world ends a rank that is in a wait.

        Args:
            count: How many; the one after them means what it always does.
        """

    @abstractmethod
    def close(self) -> None:
        """Close every local transport."""
