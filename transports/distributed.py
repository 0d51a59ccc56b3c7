"""A rank that is a process of an `mx.distributed` group: what ring and JACCL share.

Communication happens when a node is evaluated, so each one is evaluated by itself, in the order that `lines` says::

    single         one stream, one evaluation at a time, in the thread of the program
    directional    that for receives and collectives, and for each peer a thread with a stream of its own for sends

A collective begins when everything sent before it has left, since beside a send on another stream it corrupts data.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import NoReturn, TypeVar

import mlx.core as mx

from transports.base import Lanes, Receive, Sum, Task, Transport, Wait, World
from transports.errors import PeerLost, TransportClosed, TransportError, UndeliveredMessage
from transports.lines import COLLECTIVE, Lane, needed
from transports.wire import MAX_PIECE_BYTES, Sender, Wire, evaluate, joined

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class GroupOperation(Wait):
    """One communication; `perform` returns when it is over."""

    lane: Lane
    what: str
    perform: Callable[[], None]

    def describe(self) -> str:
        """What is being waited for, in words; see `Wait.describe`."""
        return self.what


class GroupSum(GroupOperation, Sum):
    """A sum over all ranks; its array is lazy until the wait is over."""


@dataclass(eq=False, slots=True)
class GroupReceive(Receive):
    """A message whose array depends on nodes that receive it when they are evaluated."""

    array: mx.array
    nodes: list[mx.array]
    source: int
    label: str
    is_asked_for: bool = field(default=False)


class GroupTransport(Transport):
    """This process's end of a group.

    Args:
        group: Who communicates.
        lanes: Whether sends go through the one stream of everything, or leave in threads of their own.
        peers: The ranks that links lead to.
        max_piece_bytes: Larger messages go in several pieces; the same on every rank.
    """

    def __init__(
        self,
        group: mx.distributed.Group,
        lanes: Lanes,
        peers: Collection[int],
        max_piece_bytes: int = MAX_PIECE_BYTES,
    ) -> None:
        self.rank = group.rank()
        self.world_size = group.size()
        self.lanes: Lanes = lanes
        self._wire = Wire(group, max_piece_bytes)
        self._peers = sorted(peers)
        senders = self._peers if lanes == "directional" else []
        self._senders = {peer: Sender(group, peer, max_piece_bytes) for peer in senders}
        self._pending: list[GroupOperation] = []
        self._position = "its beginning"
        self._closed_because: str | None = None

    def send(self, array: mx.array, to: int, label: str = "") -> Wait:
        """Evaluate the array and hand it to the peer's sender, or to the single lane; see `Transport.send`."""
        self._check_usable(to)
        value = mx.contiguous(array)
        mx.eval(value)  # Outside the wire's errors: what fails here is the caller's own computation.
        what = f"{label or 'a message'} to leave for rank {to}"
        operation = GroupOperation(("to", to), what, lambda: evaluate(self._wire.send(value, to)))
        if self.lanes == "single":
            self._pending.append(operation)
            return operation
        self._complete([earlier for earlier in self._pending if earlier.lane == COLLECTIVE])
        self._senders[to].post(value)
        return operation

    def receive(self, shape: Sequence[int], dtype: mx.Dtype, source: int, label: str = "") -> Receive:
        """Make lazy nodes, which `arrive` evaluates; see `Transport.receive`."""
        self._check_usable(source)
        nodes = self._wire.receive(shape, dtype, source)
        return GroupReceive(joined(nodes, shape, dtype), nodes, source, label)

    def arrive(self, receive: Receive) -> Wait:
        """Queue up for the next message of the link; see `Transport.arrive`."""
        if not isinstance(receive, GroupReceive):
            raise TypeError(f"[rank {self.rank}] {receive!r} is no receive of this transport.")
        self._check_usable(receive.source)
        if receive.is_asked_for:
            raise TransportError(f"[rank {self.rank}] arrive was called twice for {receive.label or 'a receive'}.")
        receive.is_asked_for = True
        what = f"{receive.label or 'a message'} from rank {receive.source}"
        self._pending.append(GroupOperation(("from", receive.source), what, partial(_take, receive)))
        return self._pending[-1]

    def all_sum(self, array: mx.array, label: str = "") -> Sum:
        """Queue up for the next collective; see `Transport.all_sum`."""
        self._check_usable()
        value = mx.contiguous(array)
        mx.eval(value)
        nodes = self._wire.all_sum(value)
        what = f"every rank to come to {label or 'an all_sum'}"
        total = GroupSum(COLLECTIVE, what, partial(evaluate, nodes))
        total.array = joined(nodes, array.shape, array.dtype)
        self._pending.append(total)
        return total

    def flush(self) -> Wait:
        """Wait for everything that was sent; see `Transport.flush`."""
        self._check_usable()
        return GroupOperation(("flush", -1), "everything sent to leave", self._flush)

    def clock(self) -> float:
        """Seconds of `time.perf_counter`."""
        return perf_counter()

    def stand_at(self, position: str) -> None:
        """Remember the position for reports; see `Transport.stand_at`."""
        self._position = position

    def close(self) -> None:
        """Return when everything that was sent has left; see `Transport.close`."""
        if self._closed_because is None:
            self._flush()
            self._end("it was closed")

    def wait(self, wait: Wait) -> None:
        """Block until a wait is over.

        Raises:
            PeerLost: If the wire fails meanwhile. The transport is closed then.
        """
        if not isinstance(wait, GroupOperation):
            raise TypeError(f"[rank {self.rank}] yielded {wait!r}, which is no wait of this transport.")
        if wait.lane[0] == "flush":
            wait.perform()
        else:
            self._complete([wait])

    def finish(self) -> None:
        """Deliver what was sent at the end of a task, and check that nothing that it asked for is left."""
        if self._closed_because is not None:
            return
        self._flush()
        if self._pending:
            left = ", ".join(operation.describe() for operation in self._pending)
            self.abandon(f"its task ended before {left}")
            raise UndeliveredMessage(f"[rank {self.rank}] the task has ended, but never waited for {left}.")

    def abandon(self, because: str) -> None:
        """Close without touching the wire again: after an error in MLX everything on it would wait for ever."""
        self._pending.clear()
        self._end(because)

    def _complete(self, targets: Collection[GroupOperation]) -> None:
        for operation in needed(self._pending, targets, self.lanes):
            if operation.lane == COLLECTIVE:
                self._flush_senders()
            self._guarded(operation.what, operation.perform)
            self._pending.remove(operation)

    def _flush(self) -> None:
        self._complete([operation for operation in self._pending if operation.lane[0] == "to"])
        self._flush_senders()

    def _flush_senders(self) -> None:
        for peer, sender in self._senders.items():
            self._guarded(f"everything sent to leave for rank {peer}", sender.flush)

    def _guarded(self, what: str, act: Callable[[], None]) -> None:
        try:
            act()
        except RuntimeError as error:
            self._lose(what, error)

    def _lose(self, what: str, error: RuntimeError) -> NoReturn:
        lost = PeerLost(
            f"[rank {self.rank}] at {self._position}, waiting for {what}: {error}. "
            f"The process at the other end has ended: see what it said last."
        )
        self.abandon(f"its first error was {lost}")
        raise lost from error

    def _end(self, because: str) -> None:
        self._closed_because = self._closed_because or because
        for sender in self._senders.values():
            sender.close()

    def _check_usable(self, *peers: int) -> None:
        if self._closed_because is not None:
            raise TransportClosed(f"[rank {self.rank}] this transport is closed: {self._closed_because}")
        for peer, sender in self._senders.items():
            if sender.error is not None:
                self._lose(f"everything sent to leave for rank {peer}", sender.error)
        for peer in peers:
            if peer not in self._peers:
                raise TransportError(f"[rank {self.rank}] no link leads to rank {peer}. Links lead to {self._peers}.")


def _take(receive: GroupReceive) -> None:
    evaluate([*receive.nodes, receive.array])
    receive.nodes.clear()


class GroupWorld(World):
    """The one rank of a group that this process is."""

    def __init__(self, transport: GroupTransport) -> None:
        self.world_size = transport.world_size
        self.local_ranks = (transport.rank,)
        self._transport = transport

    def transport(self, rank: int) -> GroupTransport:
        """The transport of this process's rank; see `World.transport`."""
        if rank not in self.local_ranks:
            raise ValueError(f"This process is rank {self.local_ranks[0]}: rank {rank} is another one.")
        return self._transport

    def run(self, tasks: Mapping[int, Task[T]]) -> dict[int, T]:
        """Run this rank's task, blocking in its waits; see `World.run`."""
        if tuple(tasks) != self.local_ranks:
            raise ValueError(f"Expected a task for each of the ranks {self.local_ranks}, not for {sorted(tasks)}.")
        rank, task = next(iter(tasks.items()))
        try:
            result = self._drive(task)
            self._transport.finish()
        except BaseException as error:
            self._transport.abandon(f"the run ended with {type(error).__name__}: {error}")
            task.close()
            raise
        return {rank: result}

    def close(self) -> None:
        """Close this rank's transport; see `World.close`."""
        self._transport.close()

    def _drive(self, task: Task[T]) -> T:
        try:
            wait = next(task)
            while True:
                try:
                    self._transport.wait(wait)
                except TransportError as error:
                    wait = task.throw(error)
                else:
                    wait = next(task)
        except StopIteration as end:
            return end.value
