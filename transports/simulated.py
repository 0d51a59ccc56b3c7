"""One rank of a simulated world: what it has asked for, what it waits for, its clock, and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import mlx.core as mx

from transports.base import Lanes, Receive, Sum, Task, Transport, Wait
from transports.buffers import poisoned
from transports.errors import RankDied, TransportClosed, TransportError, TransportTimeout
from transports.faults import Dies, Part, When
from transports.lines import Lane, first_in_line, is_behind, needed
from transports.links import Message, Topology, neighbours
from transports.operations import Arrive, BufferReceive, Collective, Done, Flush, Operation, Send

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a rank, and when by its own clock."""

    seconds: float
    rank: int
    what: str

    def __str__(self) -> str:
        return f"{self.seconds:12.6f} s  rank {self.rank}  {self.what}"


@dataclass(frozen=True, slots=True)
class Rules:
    """What holds for every rank of a world."""

    world_size: int
    topology: Topology
    lanes: Lanes
    durations: Callable[[str], float] | float | None
    """How long the instruction at a position takes; None to measure it."""
    timer: Callable[[], float]
    timeout_seconds: float | None

    def measured(self) -> float:
        """Seconds of the clock that measures; it stands still where durations are given."""
        return self.timer() if self.durations is None else 0.0

    def given(self, position: str) -> float:
        """Seconds that pass at a position without being measured."""
        return self.durations(position) if callable(self.durations) else self.durations or 0.0


class LoopbackTransport(Transport):
    """One rank of a `LoopbackWorld`."""

    checks_messages = True
    """Shape and dtype always; in checked mode, by its header, that it is the message and whole."""

    def __init__(self, rank: int, rules: Rules, deaths: Sequence[Dies], log: list[Event]) -> None:
        self.rank = rank
        self.world_size = rules.world_size
        self.lanes: Lanes = rules.lanes
        self.pending: list[Operation] = []
        self.is_running = False
        self.death: RankDied | None = None
        self._rules = rules
        self._peers = neighbours(rank, rules.world_size, rules.topology)
        self._deaths = deaths
        self._log = log
        self._done: dict[Lane, Done] = {}
        self._num_communications = 0
        self._num_instructions = 0
        self._waits_for: Operation | None = None
        self._failure: TransportError | None = None
        self._closed_because: str | None = None
        self._position = "its beginning"
        self._now = 0.0
        self._waits_since = 0.0
        self._resumed_at: float | None = None

    def send(self, array: mx.array, to: int, label: str = "") -> Wait:
        """Copy the array's value now; see `Transport.send`."""
        self._check_usable(to)
        send = Send(self.clock(), to, Message.of(array, label))
        self._ask_for(send)
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
        arrive = Arrive(self.clock(), receive)
        self._ask_for(arrive)
        return arrive

    def all_sum(self, array: mx.array, label: str = "") -> Sum:
        """Queue up for the next collective; see `Transport.all_sum`."""
        self._check_usable()
        collective = Collective(self.clock(), Message.of(array, label))
        self._ask_for(collective)
        return collective

    def flush(self) -> Wait:
        """Wait for every send that has been asked for so far; see `Transport.flush`."""
        self._check_usable()
        left = [done for done in self._done.values() if done.lane[0] == "to"]
        last = max(left, key=lambda done: done.at, default=None)
        return Flush(self.clock(), self.unsent(), last)

    def clock(self) -> float:
        """Virtual seconds: those that this rank computed, and those that it waited for others' virtual time."""
        return self._now + (0.0 if self._resumed_at is None else self._rules.measured() - self._resumed_at)

    def stand_at(self, position: str) -> None:
        """Remember the position for reports, and let its time pass if that is given; see `Transport.stand_at`."""
        number = self._num_instructions
        self._end_task_if("after", "instruction", number - 1)
        self._num_instructions += 1
        self._position = position
        self.record(f"stands at {position}")
        self._end_task_if("before", "instruction", number)
        seconds = self._rules.given(position)
        self._now += seconds / 2
        self._end_task_if("in", "instruction", number)
        self._now += seconds / 2

    def close(self) -> None:
        """Take no more orders; what was sent is still delivered."""
        self._close("it was closed")

    def record(self, what: str) -> None:
        """Keep what has happened."""
        self._log.append(Event(self.clock(), self.rank, what))

    def fail(self, error: TransportError, at: float = 0.0) -> None:
        """End this rank's wait with an error, at that time or now, and the transport with it."""
        self._now = max(self._now, at)
        self._failure = error
        self.pending.clear()
        self._close(f"its first error was {error}")

    def lose(self, kind: type[TransportError], cause: str, at: float) -> TransportError:
        """End this rank's wait with word of why another rank has ended."""
        lost = kind(f"[rank {self.rank}] at {self._position}{self._waiting()}: {cause}")
        self.fail(lost, at)
        return lost

    def time_out(self, operation: Operation) -> None:
        """End this rank's wait because an operation was not over in time."""
        timeout = self._rules.timeout_seconds or 0.0
        error = TransportTimeout(
            f"[rank {self.rank}] at {self._position}: waited {timeout:g} s for {operation.describe()}, in vain. "
            f"The process at the other end is there, but nothing moves."
        )
        self.fail(error, self._waits_since + timeout)

    def die_if(self, when: When, part: Part, number: int) -> None:
        """Die if a fault says so.

        Raises:
            RankDied: If one does.
        """
        for death in self._deaths:
            if (death.when, death.part, death.number) == (when, part, number):
                self.death = RankDied(f"[rank {self.rank}] {death}, standing at {self._position}")
                self.record(str(death))
                raise self.death

    def abandon(self, because: str) -> None:
        """Stop running and close, without delivering anything more."""
        self.is_running, self._failure = False, None
        self.pending.clear()
        self._closed_because = because

    def begin(self) -> None:
        """Take up a new task."""
        self.is_running, self._waits_for = True, None
        self._waits_since = self._now

    def resume(self, task: Task[T]) -> None:
        """Run this rank to its next wait, on its own clock; raises `StopIteration` at its end."""
        failure = self._end_wait()
        self.record("goes on" if failure is None else f"is told {type(failure).__name__}: {failure}")
        self._resumed_at = self._rules.measured()
        try:
            wait = next(task) if failure is None else task.throw(failure)
        except StopIteration:
            self.die_if("after", "instruction", self._num_instructions - 1)
            raise
        finally:
            self._now, self._resumed_at = self.clock(), None
            self._waits_since = self._now
            if self.death is not None:
                raise self.death from None  # Whatever the task did when it was ended.
        if not isinstance(wait, Operation):
            raise TypeError(f"[rank {self.rank}] yielded {wait!r}, which is no wait of this transport.")
        self._waits_for = wait

    def _end_wait(self) -> TransportError | None:
        if self._failure is None and self._waits_for is not None:
            over_at, timeout = self._waits_for.when(), self._rules.timeout_seconds
            if timeout is not None and over_at > self._waits_since + timeout:
                self.time_out(self._waits_for)
            else:
                self._now = max(self._now, over_at)
        failure, self._failure, self._waits_for = self._failure, None, None
        return failure

    def can_go_on(self) -> bool:
        """Whether this rank's wait is over, one way or the other."""
        if not self.is_running:
            return False
        return self._failure is not None or self._waits_for is None or self._waits_for.is_over()

    def startable(self) -> list[Operation]:
        """The operations that are first in their line, and waited for or in the background."""
        wanted = self.wanted()
        first = first_in_line(self.pending, self.lanes)
        return [op for op in first if op in wanted or self._is_background(op)]

    def begins_at(self, operation: Operation) -> float:
        """When a startable operation begins: what is not in the background begins when its rank waits."""
        return operation.ready_at if self._is_background(operation) else max(operation.ready_at, self.clock())

    def finish(self, operation: Operation, at: float) -> None:
        """Let an operation be over, and those in line behind it begin."""
        operation.over_at = at
        self.pending.remove(operation)
        self._done[operation.lane] = Done(operation.lane, at)
        self._log.append(Event(at, self.rank, f"has waited for {operation.describe()}"))
        for later in self.pending:
            if is_behind(later, operation, self.lanes):
                later.ready_at = max(later.ready_at, at)
        self.die_if("after", "communication", operation.number)

    def describe(self) -> str:
        """Where this rank stands and what it waits for, for a deadlock's report."""
        wanted = self.wanted()
        if not self.is_running:
            return "; ".join([f"rank {self.rank} has ended", *(f"but waits for {op.describe()}" for op in wanted)])
        if self._waits_for is None:
            return f"rank {self.rank} stands at {self._position}"
        behind = (
            f", in line behind {wanted[0].describe()}" if wanted and wanted[0] not in self._waits_for.needs() else ""
        )
        return f"rank {self.rank} stands at {self._position} and waits for {self._waits_for.describe()}{behind}"

    def times_out_at(self) -> float:
        """When this rank's wait has lasted too long."""
        return self._waits_since + (self._rules.timeout_seconds or 0.0)

    def wanted(self) -> list[Operation]:
        """What this rank waits for, and what that is in line behind, in the order of the program."""
        targets = [] if self._waits_for is None else list(self._waits_for.needs())
        if self._closed_because is not None or not self.is_running:
            targets += self.unsent()  # Whoever has ended or closed still delivers what it sent.
        return needed(self.pending, targets, self.lanes)

    def unsent(self) -> list[Operation]:
        """The sends that have not left."""
        return [operation for operation in self.pending if isinstance(operation, Send)]

    def _is_background(self, operation: Operation) -> bool:
        return self.lanes == "directional" and isinstance(operation, Send)

    def _ask_for(self, operation: Operation) -> None:
        operation.number = self._num_communications
        self._num_communications += 1
        behind = [done.at for done in self._done.values() if is_behind(operation, done, self.lanes)]
        operation.ready_at = max([operation.ready_at, *behind])
        self.record(f"asks for {operation.describe()}")
        self._end_task_if("before", "communication", operation.number)
        self.pending.append(operation)

    def _end_task_if(self, when: When, part: Part, number: int) -> None:
        """Die in the middle of the task, which ends as if it were closed: no handler of errors can keep it alive."""
        try:
            self.die_if(when, part, number)
        except RankDied:
            raise GeneratorExit from None

    def _waiting(self) -> str:
        wait = self._waits_for
        return "" if wait is None or wait.is_over() else f", waiting for {wait.describe()}"

    def _close(self, because: str) -> None:
        self._closed_because = self._closed_because or because

    def _check_usable(self, *peers: int) -> None:
        if self._closed_because is not None:
            raise TransportClosed(f"[rank {self.rank}] this transport is closed: {self._closed_because}")
        for peer in peers:
            if peer not in self._peers:
                raise TransportError(
                    f"[rank {self.rank}] no link leads to rank {peer}. In this {self._rules.topology} of "
                    f"{self.world_size} links lead to {self._peers}."
                )
