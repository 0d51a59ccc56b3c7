"""Runs a program's communication in thought, and says whether every rank comes to its end.

How a program runs
------------------
A directed link holds at most `capacity` messages, None for any number. A receive takes the oldest, or blocks while
there is none. With capacity 0 a message goes from hand to hand: its sender and its receiver both stand at it.

With a **single** lane every rank does its instructions one after the other, and a send blocks until the link has room.
With **directional** lanes a send never blocks its rank: it goes into a queue, one for each peer, and messages leave
each queue for their link in the order in which they came, in the background, while the rank goes on. A receive blocks
at its place. A rank has come to its end when its queues are empty.

What a message is does not matter here: a receive takes whatever comes. Actions never block.

Why one run decides
-------------------
Only rank i puts messages on the link from i to j, and only j takes them. So when i can put one, nothing that another
rank does takes that away: j can only make room. When j can take one, i can only bring more. At a rendezvous neither
side can do anything else; and a queue of a directional lane is one more link, of any capacity, whose far end is a
process of its own. Hence two steps that are both possible can be done in either order, with the same state after both
(the diamond). Then all maximal runs have the same steps and the same end: if one run brings every rank to its end, all
do; if one comes to a stand, all do, at the same instructions. (A Kahn network with bounded links.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from pptrain.program import Instruction, Message, Program, Receive, Send
from pptrain.schedule import Action
from transports import Lanes


def find_deadlock(programs: Sequence[Program], capacity: int | None, lanes: Lanes) -> str | None:
    """Where each rank stands and the cycle in which they wait, if not every rank comes to its end.

    Args:
        programs: The program of each rank.
        capacity: How many messages a link holds; None for any number.
        lanes: How a rank communicates.
    """
    if capacity is not None and capacity < 0:
        raise ValueError(f"A link holds 0 messages or more, or None for any number, not {capacity}.")
    run = _Run(programs, capacity, lanes)
    run.go()
    waits = {rank: wait for rank in range(len(programs)) if (wait := run.wait_of(rank))}
    if not waits:
        return None
    links = "links of any capacity" if capacity is None else f"links of capacity {capacity}"
    lane = "a single lane" if lanes == "single" else "directional lanes"
    lines = [f"  {run.stand_of(rank)} and waits for {wait.words}" for rank, wait in waits.items()]
    return f"No rank can go on, over {links} and {lane}:\n" + "\n".join(lines) + "\n" + _chain(waits)


@dataclass(frozen=True, slots=True)
class _Wait:
    peer: int
    words: str


class _Run:
    """One maximal run. Which one does not matter: see the module's docstring."""

    def __init__(self, programs: Sequence[Program], capacity: int | None, lanes: Lanes) -> None:
        self._programs, self._lanes = programs, lanes
        self._capacity = inf if capacity is None else capacity
        self._places = [0] * len(programs)
        self._links = dict[tuple[int, int], deque[Message]]()
        """What was sent and not yet received: on the wire, and with directional lanes in the queue before it."""

    def go(self) -> None:
        """Let every rank go on until none can."""
        awake = deque(range(len(self._programs)))
        while awake:
            rank = awake.popleft()
            while self._step(rank):
                # Only the peer of what was just done may be able to go on because of it.
                peer = _peer(self._programs[rank][self._places[rank] - 1])
                if peer is not None and 0 <= peer < len(self._programs):
                    awake.append(peer)

    def _step(self, rank: int) -> bool:
        """Do a rank's next instruction, if there is one and it can be done."""
        match self._next(rank):
            case None:
                return False
            case Action():
                done = True
            case Send(message, to):
                done = self._put(message, rank, to) or self._meet(rank, to, to)
            case Receive(_, source):
                done = self._take(source, rank) or self._meet(source, rank, source)
        self._places[rank] += done
        return done

    def _put(self, message: Message, rank: int, to: int) -> bool:
        link = self._links.setdefault((rank, to), deque())
        if self._lanes == "single" and len(link) >= self._capacity:
            return False
        link.append(message)
        return True

    def _take(self, source: int, rank: int) -> bool:
        link = self._links.get((source, rank))
        if not link:
            return False
        link.popleft()
        return True

    def _meet(self, source: int, to: int, peer: int) -> bool:
        """A rendezvous on a single lane: if both stand at it, the peer has done its part."""
        if self._lanes != "single" or self._capacity > 0 or source == to:
            return False
        match self._next(source), self._next(to):
            case Send(_, rank), Receive(_, other) if rank == to and other == source:
                self._places[peer] += 1
                return True
            case _:
                return False

    def _next(self, rank: int) -> Instruction | None:
        if not 0 <= rank < len(self._programs) or self._places[rank] == len(self._programs[rank]):
            return None
        return self._programs[rank][self._places[rank]]

    def stand_of(self, rank: int) -> str:
        """The instruction at which a rank stands, in words."""
        instruction, place = self._next(rank), self._places[rank]
        return f"rank {rank} stands at " + (
            "its end" if instruction is None else f"{instruction} (instruction {place})"
        )

    def wait_of(self, rank: int) -> _Wait | None:
        """What a rank waits for after `go`; None if it has come to its end."""
        match self._next(rank):
            case Receive(message, source):
                return _Wait(source, f"{message} from rank {source}")
            case Send(_, to):
                return _Wait(to, f"rank {to} to {'make room' if self._capacity else 'take it'}")
            case _:
                return self._unsent(rank)

    def _unsent(self, rank: int) -> _Wait | None:
        """The first message that a rank at its end could not get rid of."""
        for (source, to), link in self._links.items():
            if source == rank and len(link) > self._capacity:
                return _Wait(to, f"rank {to} to take {link[int(self._capacity)]}, which is still in its queue")
        return None


def _peer(instruction: Instruction) -> int | None:
    match instruction:
        case Send():
            return instruction.to
        case Receive():
            return instruction.source
        case Action():
            return None


def _chain(waits: dict[int, _Wait]) -> str:
    """Follow who waits for whom: into a cycle, or to a rank that has ended."""
    chain = [min(waits)]
    while (peer := waits[chain[-1]].peer) in waits and peer not in chain:
        chain.append(peer)
    if peer not in waits:
        return f"Rank {chain[-1]} waits for rank {peer}, which has nothing more to do."
    cycle = [*chain[chain.index(peer) :], peer]
    return "They wait in a cycle: " + " -> ".join(f"rank {rank}" for rank in cycle) + "."
