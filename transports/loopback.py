"""All ranks in one process and one thread: a simulated world that can be replayed from its seed.

A rank's program is a generator. It is resumed when its wait is over, and the world picks who goes on with a seeded
random choice, so a run is one of all possible interleavings, and always the same one for a seed. Nobody can go on: a
deadlock, found at once and explained.

What a rank asked for moves in the order that `lines` says, over links of a stated capacity::

    rank 0      send 0F0 ─┬─> link 0 to 1: [ wire, at most `capacity` messages ] ──> arrive 0F0      rank 1
                          └── capacity 0: no wire, a message moves only into the hands of a rank that waits for it

Sends of directional lanes leave in the background. Everything else moves only while its rank waits for it, or for
something in line behind it, as over real processes, where nobody takes a message while the rank computes.

The first error that leaves a rank's task, and the first death, ends the run: every other rank that has not ended gets
word of it at its wait, in `PeerLost`. What a stalled link or a silent rank holds back is `TransportTimeout` on the rank
that waits for it, and then on all. In checked mode no fault makes a wrong number: without it, a flipped bit is not seen
and a doubled message is taken for the next one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import TypeVar, cast

from transports.base import Lanes, Task, World
from transports.buffers import fill
from transports.errors import (
    BoundaryMismatch,
    DeadlockError,
    PeerLost,
    RankDied,
    TransportError,
    TransportTimeout,
    UndeliveredMessage,
)
from transports.faults import Dies, Fault
from transports.links import Link, Message, Topology, neighbours
from transports.operations import Arrive, Collective, Operation, Send
from transports.simulated import Event, LoopbackTransport, Rules

T = TypeVar("T")
Pair = tuple[int, int]


class LoopbackWorld(World):
    """Ranks that share a process, linked pair by pair.

    Args:
        world_size: How many ranks.
        capacity: How many messages fit on a link; None for any number, 0 for a rendezvous.
        lanes: Whether a rank does one communication at a time, or sends in the background.
        seed: Decides who goes on, wherever several ranks can.
        timer: Measures how long a rank computes, in seconds.
        topology: Which ranks have links.
        latency_seconds: How long a message takes after it has left; for all links, or by `(source, to)`. A sum takes as
            long as its array takes over the slowest link.
        bandwidth_bytes_per_second: How fast a message leaves; for all links, or by `(source, to)`; None for at once.
        durations: How many seconds an instruction takes, or the one at a position; they pass when its rank comes to
            stand at it, and nothing is measured. None to measure with `timer`.
        faults: What goes wrong.
        timeout_seconds: How long a wait may last on its rank's clock; None for as long as it takes.
        check_messages: Whether each message carries a header by which its receiver knows it, and its bytes.

    Attributes:
        outcomes: Of a run that failed: for each rank what it returned, or the error that ended it. What a run returns
            is not kept.
        log: What happened in the last run, in the order in which the world did it. It is the same again for the same
            tasks and arguments; its seconds too, where they are given and not measured.
    """

    def __init__(
        self,
        world_size: int,
        *,
        capacity: int | None = None,
        lanes: Lanes = "directional",
        seed: int = 0,
        timer: Callable[[], float] = perf_counter,
        topology: Topology = "mesh",
        latency_seconds: float | Mapping[Pair, float] = 0.0,
        bandwidth_bytes_per_second: float | Mapping[Pair, float] | None = None,
        durations: Callable[[str], float] | float | None = None,
        faults: Sequence[Fault] = (),
        timeout_seconds: float | None = None,
        check_messages: bool = False,
    ) -> None:
        if world_size < 1 or (capacity is not None and capacity < 0):
            raise ValueError(f"A loopback needs a rank and no negative capacity, not {world_size=}, {capacity=}.")
        self.world_size = world_size
        self.local_ranks = tuple(range(world_size))
        self.outcomes: dict[int, object] = {}
        self.log: list[Event] = []
        self._line = (
            f"LoopbackWorld({world_size}, {capacity=}, {lanes=}, {seed=}, {topology=}, {latency_seconds=}, "
            f"{bandwidth_bytes_per_second=}, {durations=}, {timeout_seconds=}, {check_messages=}, {faults=})"
        )
        self._timeout_seconds = timeout_seconds
        self._random = random.Random(seed)
        rules = Rules(world_size, topology, lanes, durations, timer, timeout_seconds)
        self._transports = [
            LoopbackTransport(rank, rules, [f for f in faults if isinstance(f, Dies) and f.rank == rank], self.log)
            for rank in self.local_ranks
        ]
        pairs = [(rank, to) for rank in self.local_ranks for to in neighbours(rank, world_size, topology)]
        _check_places(faults, self.local_ranks, pairs)
        self._links = {
            pair: Link(
                capacity,
                _of_link(latency_seconds, pair) or 0.0,
                _of_link(bandwidth_bytes_per_second, pair),
                [fault for fault in faults if not isinstance(fault, Dies) and (fault.source, fault.to) == pair],
                check_messages,
            )
            for pair in pairs
        }

    def __repr__(self) -> str:
        """The call that makes this world again; functions do not show in it."""
        return self._line

    def transport(self, rank: int) -> LoopbackTransport:
        """The transport of a rank; see `World.transport`."""
        return self._transports[rank]

    def run(self, tasks: Mapping[int, Task[T]]) -> dict[int, T]:
        """Step the ranks in a seeded order until all have ended.

        Raises:
            DeadlockError: If nobody can go on.
            UndeliveredMessage: If all have ended and a message was not received.
            RankDied: If a fault said so.
            Exception: Whatever a task raised first; the others got word of it, and all transports are closed.
        """
        for _ in self.steps(tasks):
            pass
        results, self.outcomes = self.outcomes, {}
        return cast(dict[int, T], dict(sorted(results.items())))

    def steps(self, tasks: Mapping[int, Task[T]]) -> Iterator[int]:
        """Run as `run` does, and yield the rank that went on after each step."""
        if sorted(tasks) != list(self.local_ranks):
            raise ValueError(f"Expected a task for each of the ranks {self.local_ranks}, not for {sorted(tasks)}.")
        self.log.clear()
        self.outcomes = {}
        try:
            yield from self._steps(tasks)
        except BaseException as error:
            if isinstance(error, Exception):
                self._spread(error, tasks)
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

    def _steps(self, tasks: Mapping[int, Task[T]]) -> Iterator[int]:
        for transport in self._transports:
            transport.begin()
        while any(transport.is_running for transport in self._transports):
            transport = self._choose()
            self._resume(transport, tasks[transport.rank])
            self._settle()
            yield transport.rank
        self._check_all_delivered()

    def _resume(self, transport: LoopbackTransport, task: Task[T]) -> None:
        try:
            transport.resume(task)
        except StopIteration as end:
            self.outcomes[transport.rank] = end.value
            transport.is_running = False
            transport.record("ends")
        except Exception as error:
            self.outcomes[transport.rank] = error
            transport.is_running = False
            raise

    def _spread(self, error: Exception, tasks: Mapping[int, Task[T]]) -> None:
        """Give word of the first error to every rank that has not ended, in a seeded order."""
        for transport in self._transports:
            if transport.death is error:  # It may have died in the background, with its task at a wait or ended.
                self.outcomes[transport.rank], transport.is_running = error, False
                transport.abandon(str(error))
        guilty = [self._transports[rank] for rank, outcome in self.outcomes.items() if outcome is error]
        for transport in self._random.sample(self._transports, self.world_size):
            if transport.is_running or (transport not in guilty and transport.unsent()):
                self.outcomes[transport.rank] = failure = _word_of(error, guilty, transport)
                if transport.is_running:
                    self._end(transport, tasks[transport.rank], failure)

    def _end(self, transport: LoopbackTransport, task: Task[T], failure: TransportError) -> None:
        """Let a rank end with a failure; one that would wait again is ended where it stands."""
        try:
            self._resume(transport, task)
        except Exception as error:
            if error is not failure:
                transport.record(f"ends with {type(error).__name__}: {error}")

    def _choose(self) -> LoopbackTransport:
        ready = [transport for transport in self._transports if transport.can_go_on()]
        if ready:
            return self._random.choice(ready)
        stalled = [(t, op) for t in self._transports if t.is_running for op in t.wanted() if self._is_stalled(t, op)]
        if self._timeout_seconds is None or not stalled:
            raise DeadlockError("\n".join(["No rank can go on:", *self._standing(), *self._still_links()]))
        late, operation = min(stalled, key=lambda pair: (pair[0].times_out_at(), pair[0].rank))
        late.time_out(operation)
        return late

    def _is_stalled(self, transport: LoopbackTransport, operation: Operation) -> bool:
        """Whether an operation would move if its link did not stand still for ever."""
        match operation:
            case Send():
                return self._links[transport.rank, operation.to].stands_still()
            case Arrive(receive=receive):
                link = self._links[receive.source, transport.rank]
                unsent = [send for send in self._transports[receive.source].unsent() if send.lane[1] == transport.rank]
                return link.stands_still() and not link.wire and bool(unsent)
            case _:
                return False

    def _standing(self) -> list[str]:
        return [f"  {transport.describe()}" for transport in self._transports]

    def _still_links(self) -> list[str]:
        return [
            f"  the link from rank {source} to rank {to} stands still before message {link.num_carried}"
            for (source, to), link in self._links.items()
            if link.stands_still()
        ]

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
        takers = self._takers(receiver, sender.rank) if link.is_rendezvous else []
        if not link.has_room() or link.stands_still() or (link.is_rendezvous and not takers):
            return False
        sender.die_if("in", "communication", send.number)
        for fault in link.faults_ahead():
            sender.record(f"meets {fault!r}")
        meets_at = [receiver.begins_at(arrive) for arrive in takers]
        sender.finish(send, link.carry(send.message, max([sender.begins_at(send), *meets_at])))
        for arrive in takers:
            self._advance_arrive(receiver, arrive)
        return True

    def _takers(self, receiver: LoopbackTransport, source: int) -> list[Arrive]:
        """What stands first in line for a source's next message: one, or none."""
        return [op for op in receiver.startable() if isinstance(op, Arrive) and op.lane == ("from", source)]

    def _advance_arrive(self, receiver: LoopbackTransport, arrive: Arrive) -> bool:
        link = self._links[arrive.receive.source, receiver.rank]
        if not link.wire:
            return False
        receiver.die_if("in", "communication", arrive.number)
        sequence = link.num_taken
        message, taken_at = link.take(receiver.begins_at(arrive))
        receiver.finish(arrive, taken_at)
        if (error := arrive.refusal(message, sequence, f"[rank {receiver.rank}]")) is None:
            fill(arrive.receive.array, message.data)
        else:
            receiver.fail(error, taken_at)
        return True

    def _advance_collective(self) -> bool:
        """Sum in the order of the ranks, once all of them have come."""
        came = [op for transport in self._transports for op in transport.startable() if isinstance(op, Collective)]
        if len(came) < self.world_size:
            return False
        self._check_agreement(came)
        self._check_nothing_on_the_wire(came)
        for transport, collective in zip(self._transports, came, strict=True):
            transport.die_if("in", "communication", collective.number)
        total = came[0].addend.array()
        for other in came[1:]:
            total = total + other.addend.array()
        summed = Message.of(total, came[0].label)
        begun_at, last = max((t.begins_at(op), t.rank) for t, op in zip(self._transports, came, strict=True))
        over_at = begun_at + max((link.crossing_seconds(summed.data.size) for link in self._links.values()), default=0)
        for transport, collective in zip(self._transports, came, strict=True):
            collective.array, collective.last_rank = summed.array(), last
            transport.finish(collective, over_at)
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
            for message in (carried.message for carried in link.wire)
        )


def _of_link(value: float | Mapping[Pair, float] | None, pair: Pair) -> float | None:
    return value.get(pair) if isinstance(value, Mapping) else value


def _check_places(faults: Sequence[Fault], ranks: Sequence[int], pairs: Sequence[Pair]) -> None:
    for fault in faults:
        is_there = fault.rank in ranks if isinstance(fault, Dies) else (fault.source, fault.to) in pairs
        if not is_there:
            raise ValueError(f"{fault!r} has no such place in this world. Ranks are {list(ranks)}, links {pairs}.")


def _word_of(error: Exception, guilty: Sequence[LoopbackTransport], transport: LoopbackTransport) -> TransportError:
    """End a rank's wait with word of the cause: a peer that it has lost, or what is wrong with all of them."""
    if guilty:
        how = "" if isinstance(error, RankDied) else f" with {type(error).__name__}"
        kind = TransportTimeout if isinstance(error, TransportTimeout) else PeerLost
        failure = transport.lose(kind, f"rank {guilty[0].rank} has ended{how}: {error}", guilty[0].clock())
        failure.__cause__ = error
        return failure
    is_ours = isinstance(error, TransportError)
    failure = type(error)(str(error)) if is_ours else TransportError(f"The run ended with {error!r}")
    transport.fail(failure)
    return failure
