"""Random conversations over every kind of link, against the plainest model: a list for each link.

A conversation is one list of steps; each rank follows it at its own end. Whatever the capacity, the lanes and the
interleaving, a rank receives what the model says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
from hypothesis import given
from hypothesis import strategies as st
from strategies import WorldCase, worlds

from transports import DeadlockError, LoopbackWorld, Receive, Sum, Task, Transport, TransportError, UndeliveredMessage
from transports.buffers import bytes_of
from transports.contract import DTYPES, Letter

Record = list[bytes]


@dataclass(frozen=True)
class Together:
    """A step of all ranks: a sum."""

    salt: int


Step = Letter | Together


@st.composite
def letters(draw: st.DrawFn, world_size: int, dtypes: Sequence[mx.Dtype] = DTYPES) -> Letter:
    source, to = draw(st.permutations(range(world_size)))[:2]
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    return Letter(source, to, shape, draw(st.sampled_from(dtypes)), draw(st.integers(0, 9)))


@st.composite
def conversations(draw: st.DrawFn) -> tuple[int, list[Step]]:
    world_size = draw(st.integers(2, 4))
    together = st.builds(Together, st.integers(0, 9))
    return world_size, draw(st.lists(letters(world_size) | letters(world_size) | together, max_size=24))


def addend(step: Together, rank: int) -> mx.array:
    return mx.arange(3) * (rank + 1) + step.salt


def model(world_size: int, steps: Sequence[Step]) -> list[Record]:
    """What each rank gets, in the order of the conversation."""
    records: list[Record] = [[] for _ in range(world_size)]
    for step in steps:
        if isinstance(step, Letter):
            records[step.to].append(bytes_of(step.values()).tobytes())
        else:
            total = sum((addend(step, rank) for rank in range(world_size)), start=mx.array(0))
            for record in records:
                record.append(bytes_of(total).tobytes())
    return records


def at_once(transport: Transport, steps: Sequence[Step]) -> Task[Record]:
    """Wait for each step before the next."""
    record: Record = []
    for step in steps:
        if isinstance(step, Together):
            total = transport.all_sum(addend(step, transport.rank))
            yield total
            record.append(bytes_of(total.array).tobytes())
        elif step.source == transport.rank:
            yield transport.send(step.values(), step.to)
        elif step.to == transport.rank:
            receive = transport.receive(step.shape, step.dtype, step.source)
            yield transport.arrive(receive)
            record.append(bytes_of(receive.array).tobytes())
    return record


def all_posted_first(transport: Transport, steps: Sequence[Step]) -> Task[Record]:
    """Ask for everything, then wait for it from the last step to the first."""
    got, waits = list[Receive | Sum](), list()
    for step in steps:
        if isinstance(step, Together):
            got.append(transport.all_sum(addend(step, transport.rank)))
            waits.append(got[-1])
        elif step.source == transport.rank:
            waits.append(transport.send(step.values(), step.to))
        elif step.to == transport.rank:
            got.append(transport.receive(step.shape, step.dtype, step.source))
            waits.append(transport.arrive(got[-1]))
    yield from waits[::-1]
    return [bytes_of(each.array).tobytes() for each in got]


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
