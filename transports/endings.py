"""What a transport promises about a rank that is lost or falls silent: how every other rank ends.

Each promise needs a world of its own, since it ends it. The last rank goes: by itself (its process ends, or stops), or
by a fault of a simulated world, which befalls it where it stands at `GONE`. The others use the transport meanwhile::

    world.run({rank: ending.task(world.transport(rank), vanish) for rank in world.local_ranks})

They end by an error of the transport, or with their process, which the transport ends where a wait of MLX cannot be
ended otherwise. Both come to the same exit code and report, and those are judged, from outside::

    ending.judge(rank, world_size, ended, limit_seconds)
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from transports.base import Task, Transport
from transports.errors import PeerLost, TransportClosed, TransportError, TransportTimeout, report_of
from transports.letters import MIB, ContractBroken, Letter, around, exchange

GONE = "the moment at which it is gone"
"""Where the last rank stands when it goes: its first instruction."""

Fate = Literal["lost", "silent"]
Use = Callable[[Transport], Task[None]]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a rank ended."""

    exit_code: int
    """Of its process, or of the error that ended its task."""
    report: str
    """What it said last."""
    seconds: float
    """How long after the last rank had gone."""

    @classmethod
    def by(cls, outcome: object, seconds: float) -> Ended:
        """Of a rank in this process, from the error that ended its task, or from what the task returned."""
        if not isinstance(outcome, Exception):
            return cls(0, "", seconds)
        exit_code = outcome.exit_code if isinstance(outcome, TransportError) else 1
        return cls(exit_code, report_of(outcome, exit_code, environ={}), seconds)


@dataclass(frozen=True, slots=True)
class Ending:
    """One promise: what becomes of the last rank, and what the others do meanwhile."""

    fate: Fate
    use: Use

    @property
    def name(self) -> str:
        """What is promised, in words that a report can show."""
        return f"a_{self.fate}_peer_ends_{self.use.__name__}"

    @property
    def error(self) -> type[TransportError]:
        """What every other rank ends by."""
        return PeerLost if self.fate == "lost" else TransportTimeout

    def task(self, transport: Transport, vanish: Callable[[], None]) -> Task[None]:
        """What each rank does from its own side.

        Args:
            transport: The rank's own.
            vanish: Called by the last rank: ends or stops its process. Does nothing where a fault does that.

        Raises:
            ContractBroken: If a rank can go on after the error.
            TransportError: What the promise is about.
        """
        yield transport.barrier()
        if transport.rank == transport.world_size - 1:
            transport.stand_at(GONE)
            vanish()
        try:
            yield from self.use(transport)
        except TransportError as error:
            _expect_closed(transport, error)
            raise

    def judge(self, rank: int, world_size: int, ended: Ended, limit_seconds: float) -> None:
        """Whether a rank that is not the last ended as promised.

        Args:
            rank: Which it is.
            world_size: How many there were.
            ended: How it ended.
            limit_seconds: How long after the other had gone this may be.

        Raises:
            ContractBroken: If it did not.
        """
        kind, gone = self.error.__name__, f"rank {world_size - 1}"
        if (ended.exit_code, f"{kind}: " in ended.report) != (self.error.exit_code, True):
            raise ContractBroken(
                f"[rank {rank}] did not end by {kind} with code {self.error.exit_code}, but with code "
                f"{ended.exit_code}: {ended.report or 'it said nothing'}"
            )
        if gone not in ended.report:
            raise ContractBroken(f"[rank {rank}] does not name {gone}, which was {self.fate}: {ended.report}")
        if self.fate == "silent" and not re.search(r"\d s\b", ended.report):
            raise ContractBroken(f"[rank {rank}] does not say how long {gone} was silent: {ended.report}")
        if ended.seconds > limit_seconds:
            raise ContractBroken(f"[rank {rank}] ended only {ended.seconds:.1f} s after {gone} was {self.fate}")


def _expect_closed(transport: Transport, error: TransportError) -> None:
    try:
        transport.send(mx.zeros((1,)), _peers_of(transport)[0])
    except TransportClosed:
        return
    raise ContractBroken(f"[rank {transport.rank}] takes more messages after its first error, {error}")


def _peers_of(transport: Transport) -> list[int]:
    return [to for source, to in around(transport.world_size) if source == transport.rank]


def a_receive(transport: Transport) -> Task[None]:
    """Every neighbour of the last rank waits for a letter from it; the others wait for all."""
    last = transport.world_size - 1
    letters = [Letter(source, to, (1000,), mx.int32) for source, to in around(transport.world_size) if source == last]
    yield from exchange(transport, letters)
    yield transport.barrier()


def a_sum(transport: Transport) -> Task[None]:
    """Everybody waits for a sum to which the last rank does not come."""
    yield transport.all_sum(mx.ones((1000,)), "a sum without the last rank")


def sends(transport: Transport) -> Task[None]:
    """Every neighbour sends to the last rank until it is told not to, which the first messages need not lead to."""
    last = transport.world_size - 1
    if transport.rank == last:
        for source in _peers_of(transport):
            yield transport.arrive(transport.receive((MIB,), mx.uint8, source, "letter 0"))
    elif last in _peers_of(transport):
        for number in range(MOST_SENDS):
            transport.stand_at(f"sending {number}")
            yield transport.send(mx.zeros((MIB,), mx.uint8), last, f"letter {number}")
            yield transport.flush()
            time.sleep(PAUSE_SECONDS)
        raise ContractBroken(f"[rank {transport.rank}] could send {MOST_SENDS} messages to rank {last}, which is gone")
    yield transport.barrier()


MOST_SENDS = 100
PAUSE_SECONDS = 0.02
"""So that all sends together take a while, and no longer."""

ENDINGS = tuple(Ending(fate, use) for fate in ("lost", "silent") for use in (a_receive, a_sum, sends))
"""All promises of this kind."""
