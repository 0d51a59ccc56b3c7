"""A rank that is a process of an `mx.distributed` group: what ring and JACCL share.

Communication happens when a node is evaluated, so each one is evaluated by itself, in the order that `lines` says::

    single         one stream, one evaluation at a time, in the thread of the program
    directional    that for receives and collectives, and for each peer a thread with a stream of its own for sends

A collective begins when everything sent before it has left, since beside a send on another stream it corrupts data.

In checked mode a header goes before each message. A `Watch` ends waits on peers that have ended or are silent.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import NoReturn, TypeVar

import mlx.core as mx

from transports.base import Lanes, Receive, Sum, Task, Transport, Wait, World
from transports.buffers import bytes_of
from transports.errors import (
    BoundaryMismatch,
    DamagedMessage,
    PeerLost,
    TransportClosed,
    TransportError,
    UndeliveredMessage,
)
from transports.header import HEADER_BYTES, Header, damage, mismatch
from transports.lines import COLLECTIVE, Lane, needed
from transports.meeting import Connections
from transports.watch import Watch
from transports.wire import MAX_PIECE_BYTES, Sender, Wire, evaluate, joined

T = TypeVar("T")

_REMEMBERED = 20
"""How many of the last instructions a report names."""

TIMEOUT_SECONDS = 600.0
"""Waits last as long as the peer computes, and a first step compiles and reads weights."""

_PATIENCE_SECONDS = 3.0
"""How long the first cause of a broken link may take to come round."""


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
    header: list[mx.array]
    """Nodes of the header, in checked mode."""
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
        check_messages: Whether a header goes before each message; the same on every rank.
    """

    def __init__(
        self,
        group: mx.distributed.Group,
        lanes: Lanes,
        peers: Collection[int],
        max_piece_bytes: int = MAX_PIECE_BYTES,
        check_messages: bool = False,
    ) -> None:
        self.rank = group.rank()
        self.world_size = group.size()
        self.lanes: Lanes = lanes
        self._wire = Wire(group, max_piece_bytes)
        self._peers = sorted(peers)
        senders = self._peers if lanes == "directional" else []
        self._senders = {peer: Sender(group, peer, max_piece_bytes) for peer in senders}
        self._pending: list[GroupOperation] = []
        self._positions = deque(["its beginning"], maxlen=_REMEMBERED)
        self._closed_because: str | None = None
        self.checks_messages = check_messages
        self._sent, self._taken = Counter[int](), Counter[int]()
        self.watch: Watch | None = None

    def send(self, array: mx.array, to: int, label: str = "") -> Wait:
        """Evaluate the array and hand it to the peer's sender, or to the single lane; see `Transport.send`."""
        self._check_usable(to)
        value = mx.contiguous(array)
        mx.eval(value)  # Outside the wire's errors: what fails here is the caller's own computation.
        parts = [*self._header(value, to, label), value]
        what = f"{label or 'a message'} to leave for rank {to}"
        operation = GroupOperation(("to", to), what, partial(self._put, parts, to))
        if self.lanes == "single":
            self._pending.append(operation)
            return operation
        self._complete([earlier for earlier in self._pending if earlier.lane == COLLECTIVE])
        for part in parts:
            self._senders[to].post(part)
        return operation

    def receive(self, shape: Sequence[int], dtype: mx.Dtype, source: int, label: str = "") -> Receive:
        """Make lazy nodes, which `arrive` evaluates; see `Transport.receive`."""
        self._check_usable(source)
        nodes = self._wire.receive(shape, dtype, source)
        header = self._wire.receive((HEADER_BYTES,), mx.uint8, source) if self.checks_messages else []
        return GroupReceive(joined(nodes, shape, dtype), nodes, header, source, label)

    def arrive(self, receive: Receive) -> Wait:
        """Queue up for the next message of the link; see `Transport.arrive`."""
        if not isinstance(receive, GroupReceive):
            raise TypeError(f"[rank {self.rank}] {receive!r} is no receive of this transport.")
        self._check_usable(receive.source)
        if receive.is_asked_for:
            raise TransportError(f"[rank {self.rank}] arrive was called twice for {receive.label or 'a receive'}.")
        receive.is_asked_for = True
        what = f"{receive.label or 'a message'} from rank {receive.source}"
        self._pending.append(GroupOperation(("from", receive.source), what, partial(self._take, receive)))
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
        self._positions.append(position)

    def close(self) -> None:
        """Return when everything that was sent has left; see `Transport.close`."""
        if self._closed_because is None:
            self._flush()
            self._end("it was closed")
            if self.watch:
                self.watch.close()

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
        self._raise_known_failure(what)
        try:
            with self.watch.waiting(what) if self.watch else nullcontext():
                act()
        except TransportError as error:
            self.fail(error)
            raise
        except RuntimeError as error:
            self._lose(what, error)

    def _raise_known_failure(self, what: str) -> None:
        if self.watch and (cause := self.watch.cause(0)):
            self._end_by(self.watch.error_of(cause, what))

    def _lose(self, what: str, error: RuntimeError) -> NoReturn:
        """MLX's own error names the neighbour whose connection broke; the watch knows who failed first."""
        if self.watch and (cause := self.watch.cause(_PATIENCE_SECONDS)):
            self._end_by(self.watch.error_of(cause, what))
        self._end_by(PeerLost(self.report(f"{error}. The process at the other end has ended", what)))

    def _end_by(self, error: TransportError) -> NoReturn:
        self.abandon(f"its first error was {error}")
        raise error

    def report(self, happened: str, waited_for: str = "") -> str:
        """Everything that helps to find out what happened, and when."""
        *before, here = self._positions
        waits = f", waiting for {waited_for}" if waited_for else ""
        what, seconds = self.watch.present_wait if self.watch else ("", 0.0)
        if what and not waited_for:
            waits = f", waiting {seconds:.1f} s for {what}"
        lines = [f"[rank {self.rank}] {happened}.", f"  This rank stood at {here}{waits}."]
        lines += [f"  Before that: {', '.join(before)}."] if before else []
        return "\n".join([*lines, "  See what that rank said last, and start all ranks again."])

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks why this one ends, and touch the wire no more."""
        if self.watch and self._closed_because is None:
            interrupted = isinstance(error, KeyboardInterrupt)
            self.watch.tell("interrupted" if interrupted else "failed", f"{type(error).__name__}: {error}")
        self.abandon(f"the run ended with {type(error).__name__}: {error}")

    def _header(self, value: mx.array, to: int, label: str) -> list[mx.array]:
        if not self.checks_messages:
            return []
        header = Header.of(self._sent[to], label, value.shape, value.dtype, bytes_of(value))
        self._sent[to] += 1
        return [header.encode()]

    def _put(self, parts: Sequence[mx.array], to: int) -> None:
        for part in parts:
            evaluate(self._wire.send(part, to))

    def _take(self, receive: GroupReceive) -> None:
        evaluate(receive.header)
        header = self._checked_header(receive) if receive.header else None
        evaluate([*receive.nodes, receive.array])
        receive.nodes.clear()
        if header and (problem := damage(header, bytes_of(receive.array))):
            raise DamagedMessage(f"[rank {self.rank}] from rank {receive.source}: {problem}. Check the link.")

    def _checked_header(self, receive: GroupReceive) -> Header | None:
        """The header that came, if it is that of the message which is waited for."""
        found = Header.decode(bytes_of(receive.header[0]))
        place, array = self._taken[receive.source], receive.array
        self._taken[receive.source] += 1
        if problem := mismatch(found, place, receive.label, array.shape, array.dtype):
            raise BoundaryMismatch(
                f"[rank {self.rank}] from rank {receive.source}: {problem}. Do both ranks use the same microbatch "
                "size, schedule and dtype?"
            )
        return found

    def _end(self, because: str) -> None:
        self._closed_because = self._closed_because or because
        for sender in self._senders.values():
            sender.close()

    def _check_usable(self, *peers: int) -> None:
        if self._closed_because is not None:
            raise TransportClosed(f"[rank {self.rank}] this transport is closed: {self._closed_because}")
        self._raise_known_failure("")
        for peer, sender in self._senders.items():
            if sender.error is not None:
                self._lose(f"everything sent to leave for rank {peer}", sender.error)
        for peer in peers:
            if peer not in self._peers:
                raise TransportError(f"[rank {self.rank}] no link leads to rank {peer}. Links lead to {self._peers}.")


class GroupWorld(World):
    """The one rank of a group that this process is.

    Args:
        transport: This rank's.
        connections: From the meeting of all ranks.
        timeout_seconds: How long a rank may be silent, or wait for one communication.
    """

    def __init__(self, transport: GroupTransport, connections: Connections, timeout_seconds: float) -> None:
        self.world_size = transport.world_size
        self.local_ranks = (transport.rank,)
        self._transport = transport
        transport.watch = Watch(transport.rank, transport.world_size, timeout_seconds, transport.report)
        transport.watch.start(connections)

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
            self._transport.fail(error)
            task.close()
            raise
        return {rank: result}

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks why this one ends; see `World.fail`."""
        self._transport.fail(error)

    def leave_signals(self, count: int) -> None:
        """Let the program handle the next ones; see `World.leave_signals`."""
        if self._transport.watch:
            self._transport.watch.leave_signals(count)

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
