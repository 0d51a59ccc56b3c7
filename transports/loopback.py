"""All ranks in one process and one thread: a simulated world that can be replayed from its seed.

A rank's program is a generator. It is resumed when its wait is over, and the world picks who goes on with a seeded
random choice, so a run is one of all possible interleavings, and always the same one for a seed. Nobody can go on: a
deadlock, found at once and explained.

What a rank asked for moves in the order that `lines` says, over links of a stated capacity::

    rank 0      send 0F0 ─┬─> link 0 to 1: [ wire, at most `capacity` messages ] ──> arrive 0F0      rank 1
                          └── capacity 0: no wire, a message moves only into the hands of a rank that waits for it

Sends of directional lanes leave in the background. Everything else moves only while its rank waits for it, or for
something in line behind it, as over real processes, where nobody takes a message while the rank computes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import TypeVar, cast

import mlx.core as mx

from transports.base import Lanes, Receive, Sum, Task, Transport, Wait, World
from transports.buffers import fill, poisoned
from transports.errors import BoundaryMismatch, DeadlockError, TransportClosed, TransportError, UndeliveredMessage
from transports.lines import first_in_line, is_behind, needed
from transports.operations import Arrive, BufferReceive, Collective, Flush, Link, Message, Operation, Send, form

T = TypeVar("T")


class LoopbackTransport(Transport):
    """One rank of a `LoopbackWorld`."""

    def __init__(self, rank: int, world_size: int, lanes: Lanes, timer: Callable[[], float]) -> None:
        self.rank = rank
        self.world_size = world_size
        self.lanes: Lanes = lanes
        self.pending: list[Operation] = []
        self.is_running = False
        self._waits_for: Operation | None = None
        self._failure: TransportError | None = None
        self._closed_because: str | None = None
        self._position = "its beginning"
        self._timer = timer
        self._now = 0.0
        self._resumed_at: float | None = None

    def send(self, array: mx.array, to: int, label: str = "") -> Wait:
        """Copy the array's value now; see `Transport.send`."""
        self._check_usable(to)
        send = Send(self.clock(), to, Message.of(array, label))
        self.pending.append(send)
        return send if self.lanes == "single" else Flush(send.ready_at, [])

    def receive(self, shape: Sequence[int], dtype: mx.Dtype, source: int, label: str = "") -> Receive:
        """Make a buffer that shows as poison until it is filled in place; see `Transport.receive`."""
        self._check_usable(source)
        return BufferReceive(poisoned(shape, dtype), source, label)

    def arrive(self, receive: Receive) -> Wait:
        """Queue up for the next message of the link; see `Transport.arrive`."""
        if not isinstance(receive, BufferReceive):
            raise TypeError(f"[rank {self.rank}] {receive!r} is no receive of this transport.")
        self._check_usable(receive.source)
        if receive.is_asked_for:
            raise TransportError(f"[rank {self.rank}] arrive was called twice for {receive.label or 'a receive'}.")
        receive.is_asked_for = True
        self.pending.append(Arrive(self.clock(), receive))
        return self.pending[-1]

    def all_sum(self, array: mx.array, label: str = "") -> Sum:
        """Queue up for the next collective; see `Transport.all_sum`."""
        self._check_usable()
        collective = Collective(self.clock(), Message.of(array, label))
        self.pending.append(collective)
        return collective

    def flush(self) -> Wait:
        """Wait for every send that has been asked for so far; see `Transport.flush`."""
        self._check_usable()
        return Flush(self.clock(), self._sends())

    def clock(self) -> float:
        """Virtual seconds: those that this rank computed, and those that it waited for others' virtual time."""
        return self._now + (0.0 if self._resumed_at is None else self._timer() - self._resumed_at)

    def stand_at(self, position: str) -> None:
        """Remember the position for reports; see `Transport.stand_at`."""
        self._position = position

    def close(self) -> None:
        """Take no more orders; what was sent is still delivered."""
        self._close("it was closed")

    def fail(self, error: TransportError) -> None:
        """End this rank's wait with an error, and the transport with it."""
        self._failure = error
        self.pending.clear()
        self._close(f"its first error was {error}")

    def abandon(self, because: str) -> None:
        """Stop running and close, without delivering anything more."""
        self.is_running, self._failure = False, None
        self.pending.clear()
        self._close(because)

    def begin(self) -> None:
        """Take up a new task."""
        self.is_running, self._waits_for = True, None

    def resume(self, task: Task[T]) -> None:
        """Run this rank to its next wait, on its own clock; raises `StopIteration` at its end."""
        if self._waits_for is not None:
            self._now = max(self._now, self._waits_for.when())
        failure, self._failure, self._waits_for = self._failure, None, None
        self._resumed_at = self._timer()
        try:
            wait = next(task) if failure is None else task.throw(failure)
        finally:
            self._now, self._resumed_at = self.clock(), None
        if not isinstance(wait, Operation):
            raise TypeError(f"[rank {self.rank}] yielded {wait!r}, which is no wait of this transport.")
        self._waits_for = wait

    def can_go_on(self) -> bool:
        """Whether this rank's wait is over, one way or the other."""
        if not self.is_running:
            return False
        return self._failure is not None or self._waits_for is None or self._waits_for.is_over()

    def startable(self) -> list[Operation]:
        """The operations that are first in their line, and waited for or in the background."""
        wanted = self._wanted()
        first = first_in_line(self.pending, self.lanes)
        return [op for op in first if op in wanted or self._is_background(op)]

    def begins_at(self, operation: Operation) -> float:
        """When a startable operation begins: what is not in the background begins when its rank waits."""
        return operation.ready_at if self._is_background(operation) else max(operation.ready_at, self.clock())

    def finish(self, operation: Operation, at: float) -> None:
        """Let an operation be over, and those in line behind it begin."""
        operation.over_at = at
        self.pending.remove(operation)
        for later in self.pending:
            if is_behind(later, operation, self.lanes):
                later.ready_at = max(later.ready_at, at)

    def describe(self) -> str:
        """Where this rank stands and what it waits for, for a deadlock's report."""
        wanted = self._wanted()
        if not self.is_running:
            return "; ".join([f"rank {self.rank} has ended", *(f"but waits for {op.describe()}" for op in wanted)])
        if self._waits_for is None:
            return f"rank {self.rank} stands at {self._position}"
        behind = (
            f", in line behind {wanted[0].describe()}" if wanted and wanted[0] not in self._waits_for.needs() else ""
        )
        return f"rank {self.rank} stands at {self._position} and waits for {self._waits_for.describe()}{behind}"

    def _is_background(self, operation: Operation) -> bool:
        return self.lanes == "directional" and isinstance(operation, Send)

    def _wanted(self) -> list[Operation]:
        """What this rank waits for, and what that is in line behind, in the order of the program."""
        targets = [] if self._waits_for is None else list(self._waits_for.needs())
        if self._closed_because is not None or not self.is_running:
            targets += self._sends()  # Whoever has ended or closed still delivers what it sent.
        return needed(self.pending, targets, self.lanes)

    def _sends(self) -> list[Operation]:
        return [operation for operation in self.pending if isinstance(operation, Send)]

    def _close(self, because: str) -> None:
        self._closed_because = self._closed_because or because

    def _check_usable(self, *peers: int) -> None:
        if self._closed_because is not None:
            raise TransportClosed(f"[rank {self.rank}] this transport is closed: {self._closed_because}")
        for peer in peers:
            if peer == self.rank or not 0 <= peer < self.world_size:
                others = [rank for rank in range(self.world_size) if rank != self.rank]
                raise TransportError(f"[rank {self.rank}] no link leads to rank {peer}. Links lead to {others}.")


class LoopbackWorld(World):
    """Ranks that share a process, linked pair by pair.

    Args:
        world_size: How many ranks.
        capacity: How many messages fit on a link; None for any number, 0 for a rendezvous.
        lanes: Whether a rank does one communication at a time, or sends in the background.
        seed: Decides who goes on, wherever several ranks can.
        timer: Measures how long a rank computes, in seconds.
    """

    def __init__(
        self,
        world_size: int,
        *,
        capacity: int | None = None,
        lanes: Lanes = "directional",
        seed: int = 0,
        timer: Callable[[], float] = perf_counter,
    ) -> None:
        if world_size < 1 or (capacity is not None and capacity < 0):
            raise ValueError(f"A loopback needs a rank and no negative capacity, not {world_size=}, {capacity=}.")
        self.world_size = world_size
        self.local_ranks = tuple(range(world_size))
        self._transports = [LoopbackTransport(rank, world_size, lanes, timer) for rank in self.local_ranks]
        pairs = [(source, to) for source in self.local_ranks for to in self.local_ranks if source != to]
        self._links = {pair: Link(capacity) for pair in pairs}
        self._random = random.Random(seed)

    def transport(self, rank: int) -> LoopbackTransport:
        """The transport of a rank; see `World.transport`."""
        return self._transports[rank]

    def run(self, tasks: Mapping[int, Task[T]]) -> dict[int, T]:
        """Step the ranks in a seeded order until all have ended.

        Raises:
            DeadlockError: If nobody can go on.
            UndeliveredMessage: If all have ended and a message was not received.
            Exception: Whatever a task raised first; the others are closed at their waits, and all transports too.
        """
        if sorted(tasks) != list(self.local_ranks):
            raise ValueError(f"Expected a task for each of the ranks {self.local_ranks}, not for {sorted(tasks)}.")
        try:
            return self._run(tasks)
        except BaseException as error:
            for rank, task in tasks.items():
                self._transports[rank].abandon(f"the run ended with {type(error).__name__}: {error}")
                task.close()
            raise

    def fail(self, error: BaseException) -> None:
        """Close every transport; see `World.fail`."""
        for transport in self._transports:
            transport.abandon(f"the run ended with {type(error).__name__}: {error}")

    def close(self) -> None:
        """Close every transport; see `World.close`."""
        for transport in self._transports:
            transport.close()

    def _run(self, tasks: Mapping[int, Task[T]]) -> dict[int, T]:
        results: dict[int, T] = {}
        for transport in self._transports:
            transport.begin()
        while len(results) < self.world_size:
            transport = self._choose()
            try:
                transport.resume(tasks[transport.rank])
            except StopIteration as end:
                results[transport.rank] = cast(T, end.value)
                transport.is_running = False
            self._settle()
        self._check_all_delivered()
        return dict(sorted(results.items()))

    def _choose(self) -> LoopbackTransport:
        ready = [transport for transport in self._transports if transport.can_go_on()]
        if not ready:
            ranks = "\n".join(f"  {transport.describe()}" for transport in self._transports)
            raise DeadlockError(f"No rank can go on:\n{ranks}")
        return self._random.choice(ready)

    def _settle(self) -> None:
        """Move everything that can move."""
        while any(self._advance(transport, op) for transport in self._transports for op in transport.startable()):
            pass

    def _advance(self, transport: LoopbackTransport, operation: Operation) -> bool:
        """Bring a startable operation to its end, if it can come there now."""
        match operation:
            case Send():
                return self._advance_send(transport, operation)
            case Arrive():
                return self._advance_arrive(transport, operation)
            case Collective():
                return self._advance_collective()
            case _:
                raise TypeError(f"{operation!r} cannot be advanced.")

    def _advance_send(self, sender: LoopbackTransport, send: Send) -> bool:
        link, receiver = self._links[sender.rank, send.to], self._transports[send.to]
        if link.is_rendezvous:
            takers = [op for op in receiver.startable() if isinstance(op, Arrive) and op.lane == ("from", sender.rank)]
            for arrive in takers:
                met_at = max(sender.begins_at(send), receiver.begins_at(arrive))
                sender.finish(send, met_at)
                self._deliver(send.message, receiver, arrive, met_at)
            return bool(takers)
        if not link.has_room():
            return False
        sender.finish(send, link.put(send.message, sender.begins_at(send)))
        return True

    def _advance_arrive(self, receiver: LoopbackTransport, arrive: Arrive) -> bool:
        link = self._links[arrive.receive.source, receiver.rank]
        if not link.wire:
            return False
        message, taken_at = link.take(receiver.begins_at(arrive))
        self._deliver(message, receiver, arrive, taken_at)
        return True

    def _deliver(self, message: Message, receiver: LoopbackTransport, arrive: Arrive, at: float) -> None:
        array = arrive.receive.array
        receiver.finish(arrive, at)
        if message.form == form(array.shape, array.dtype):
            fill(array, message.data)
            return
        receiver.fail(
            BoundaryMismatch(
                f"[rank {receiver.rank}] rank {arrive.receive.source} sent {message.label or 'a message'} as "
                f"{message.form}, but {arrive.label or 'this receive'} expects {form(array.shape, array.dtype)}. "
                f"Do both ranks use the same microbatch size and dtype?"
            )
        )

    def _advance_collective(self) -> bool:
        """Sum in the order of the ranks, once all of them have come."""
        came = [op for transport in self._transports for op in transport.startable() if isinstance(op, Collective)]
        if len(came) < self.world_size:
            return False
        self._check_agreement(came)
        self._check_nothing_on_the_wire(came)
        total = came[0].addend.array()
        for other in came[1:]:
            total = total + other.addend.array()
        summed = Message.of(total, came[0].label)
        at = max(transport.begins_at(op) for transport, op in zip(self._transports, came, strict=True))
        for transport, collective in zip(self._transports, came, strict=True):
            collective.array = summed.array()
            transport.finish(collective, at)
        return True

    def _check_agreement(self, came: Sequence[Collective]) -> None:
        if len({collective.addend.form for collective in came}) > 1:
            forms = [f"rank {rank} {op.addend.form} ({op.label or 'no label'})" for rank, op in enumerate(came)]
            raise BoundaryMismatch(f"The ranks sum arrays of different shapes or dtypes: {', '.join(forms)}.")

    def _check_nothing_on_the_wire(self, came: Sequence[Collective]) -> None:
        """A tagless link would hand a message that is still under way to the collective, as part of the sum."""
        if left := self._on_the_wire():
            label = came[0].label or "an all_sum"
            raise UndeliveredMessage(f"Every rank has come to {label}, but nobody took:\n{left}\nReceive it first.")

    def _check_all_delivered(self) -> None:
        waiting = [f"  rank {t.rank} never got {op.describe()}" for t in self._transports for op in t.pending]
        if left := "\n".join([*filter(None, [self._on_the_wire()]), *waiting]):
            raise UndeliveredMessage(f"Every rank has ended, but nobody took:\n{left}")

    def _on_the_wire(self) -> str:
        return "\n".join(
            f"  {message.label or 'a message'} from rank {source} to rank {to}, {message.form}"
            for (source, to), link in self._links.items()
            for message, _ in link.wire
        )
