"""Random conversations over every kind of link, against the plainest model: a list for each link.

Whatever the capacity, the lanes and the interleaving, a rank receives what the model says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import mlx.core as mx
from conversations import Record, Step, all_posted_first, at_once, conversations, letters, model
from hypothesis import given
from hypothesis import strategies as st
from strategies import WorldCase, worlds

from transports import DeadlockError, LoopbackWorld, Task, TransportError, UndeliveredMessage
from transports.contract import Letter


def run(world: LoopbackWorld, tasks: Sequence[Task[Record]]) -> list[Record]:
    results = world.run(dict(enumerate(tasks)))
    return [results[rank] for rank in world.local_ranks]


@given(conversations(), worlds())
def test_every_rank_gets_what_the_model_says(conversation: tuple[int, list[Step]], case: WorldCase) -> None:
    world_size, steps = conversation
    world = case.build(world_size)
    assert run(world, [at_once(world.transport(r), steps) for r in world.local_ranks]) == model(world_size, steps)


@given(conversations(), st.integers(0, 2**16))
def test_it_does_not_matter_in_which_order_one_waits(conversation: tuple[int, list[Step]], seed: int) -> None:
    world_size, steps = conversation
    world = LoopbackWorld(world_size, seed=seed, lanes="single")
    tasks = [all_posted_first(world.transport(rank), steps) for rank in world.local_ranks]
    assert run(world, tasks) == model(world_size, steps)


@given(conversations(), worlds(), st.data())
def test_background_sends_may_overtake_the_conversation(
    conversation: tuple[int, list[Step]], case: WorldCase, data: st.DataObject
) -> None:
    """With directional lanes each rank sends all it has first, and takes its links in an order of its own."""
    world_size, steps = conversation
    sent = [step for step in steps if isinstance(step, Letter)]
    world = WorldCase(case.capacity, "directional", case.seed).build(world_size)
    orders = [_by_link(data.draw(st.permutations(range(world_size))), rank, sent) for rank in range(world_size)]
    tasks = [at_once(world.transport(rank), order) for rank, order in enumerate(orders)]
    assert run(world, tasks) == [model(world_size, order)[rank] for rank, order in enumerate(orders)]


def _by_link(sources: Sequence[int], rank: int, sent: Sequence[Letter]) -> list[Step]:
    links = defaultdict[int, list[Letter]](list)
    for letter in sent:
        if letter.to == rank:
            links[letter.source].append(letter)
    return [*(each for each in sent if each.source == rank), *(each for source in sources for each in links[source])]


@st.composite
def quarrels(draw: st.DrawFn) -> tuple[int, list[list[Step]]]:
    """Each rank follows a list of its own, which need not agree with the others'."""
    world_size = draw(st.integers(2, 3))
    steps = st.lists(letters(world_size, [mx.int32]), max_size=6)
    return world_size, [draw(steps) for _ in range(world_size)]


def outcome(case: WorldCase, world_size: int, lists: Sequence[Sequence[Step]]) -> list[Record] | str:
    world = case.build(world_size)
    try:
        return run(world, [at_once(world.transport(rank), steps) for rank, steps in enumerate(lists)])
    except (DeadlockError, UndeliveredMessage) as error:
        return str(error)
    except TransportError as error:  # Of several mismatches the interleaving decides which comes first.
        return type(error).__name__


@given(quarrels(), worlds(), st.integers(0, 2**16))
def test_the_interleaving_changes_nothing(
    quarrel: tuple[int, list[list[Step]]], case: WorldCase, other_seed: int
) -> None:
    """Programs that wait for stated messages only have one outcome, a deadlock and its report included."""
    other = WorldCase(case.capacity, case.lanes, other_seed)
    assert outcome(case, *quarrel) == outcome(other, *quarrel)


@given(quarrels(), worlds())
def test_more_room_never_makes_a_deadlock(quarrel: tuple[int, list[list[Step]]], case: WorldCase) -> None:
    tight, roomy = outcome(case, *quarrel), outcome(WorldCase(None, case.lanes, case.seed), *quarrel)
    if isinstance(tight, list):
        assert roomy == tight
