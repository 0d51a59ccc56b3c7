"""How every other rank ends when one is lost or silent, in the loopback; and which promise catches which liar."""

from __future__ import annotations

import inspect
from contextlib import suppress

import liars_of_endings
import pytest
from backends import LOOPBACKS, Backend
from liar_world import Honest, LiarWorld

from transports import LoopbackWorld, TransportError, World
from transports.endings import ENDINGS, GONE, PAUSE_SECONDS, Ended, Ending
from transports.faults import Dies
from transports.letters import ContractBroken

TIMEOUT, SILENT, LIMIT = 10.0, 1e6, 15.0
IDS = [ending.name for ending in ENDINGS]


def fate(ending: Ending, world_size: int) -> dict:
    """Arguments of a loopback whose last rank dies where it is to go, or stands there beyond every timeout."""
    gone = world_size - 1
    faults = [Dies(gone, "in", "instruction", 0)] if ending.fate == "lost" else []
    seconds = {GONE: SILENT if ending.fate == "silent" else 0.0}
    return {
        "faults": faults,
        "durations": lambda position: seconds.get(position, PAUSE_SECONDS),
        "timeout_seconds": TIMEOUT,
    }


def check(ending: Ending, world: World, loopback: LoopbackWorld) -> None:
    """Every rank but the last ends as promised."""
    tasks = {rank: ending.task(world.transport(rank), lambda: None) for rank in world.local_ranks}
    with suppress(TransportError):  # The first one's, which is judged with all others.
        world.run(tasks)
    for rank in world.local_ranks[:-1]:
        clock = world.transport(rank).clock()
        ending.judge(rank, world.world_size, Ended.by(loopback.outcomes.get(rank), clock), LIMIT)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("capacity", [1, 0])
@pytest.mark.parametrize("backend", LOOPBACKS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("ending", ENDINGS, ids=IDS)
def test_every_other_rank_ends_as_promised(ending: Ending, backend: Backend, capacity: int, seed: int) -> None:
    for world_size in backend.ending_sizes:
        kwargs = {"lanes": backend.lanes, "capacity": capacity, "seed": seed, "topology": "ring"}
        world = LoopbackWorld(world_size, **kwargs, **fate(ending, world_size))
        check(ending, world, world)


@pytest.mark.parametrize("ending", ENDINGS, ids=IDS)
def test_a_rank_that_stays_is_noticed(ending: Ending) -> None:
    """Without the fault the promise has nothing to be kept in."""
    world = LoopbackWorld(2, capacity=1, durations=0.0)
    with pytest.raises(ContractBroken):
        check(ending, world, world)


CHECKS = """
    a a_lost_peer_ends_a_receive
    b a_lost_peer_ends_a_sum
    c a_lost_peer_ends_sends
    d a_silent_peer_ends_a_receive
    e a_silent_peer_ends_a_sum
    f a_silent_peer_ends_sends
"""

TABLE = """
                          abcdef
    Honest                ......
    TakesLossForAMessage  xxxxxx
    SendsIntoTheVoid      ..x..x
    TakesSilenceForLoss   ...xxx
    TakesLossForSilence   xxx...
    NamesNoPeer           xxxxxx
    BlamesItsNeighbour    xxxxxx
    DoesNotSayHowLong     ...xxx
    TellsTooLate          xxxxxx
    WorksOnAfterAnError   xxxxxx
"""
HEADER, *ROWS = TABLE.strip("\n").splitlines()
CAUGHT = {row.split()[0]: row[HEADER.index("a") :] for row in ROWS}


LIARS = {"Honest": Honest} | {
    name: each
    for name, each in inspect.getmembers(liars_of_endings, inspect.isclass)
    if issubclass(each, Honest) and each is not Honest
}


def catches(ending: Ending, liar: type[Honest]) -> bool:
    size = liar.world_size_for_this
    world = LiarWorld(liar, **{**fate(ending, size), "capacity": 1})
    try:
        check(ending, world, world.inner)
    except ContractBroken:
        return True
    return False


def test_the_table_has_every_promise_and_every_liar() -> None:
    assert sorted(CAUGHT) == sorted(LIARS)
    letters = HEADER.split()[0]
    assert [line.split() for line in CHECKS.strip().splitlines()] == [[a, b] for a, b in zip(letters, IDS, strict=True)]
    for column in zip(*CAUGHT.values(), strict=True):
        assert "x" in column


@pytest.mark.parametrize("name", CAUGHT)
def test_each_liar_is_caught_by_the_promises_of_the_table(name: str) -> None:
    assert "".join(".x"[catches(ending, LIARS[name])] for ending in ENDINGS) == CAUGHT[name]
