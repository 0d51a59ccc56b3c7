"""Random conversations under random faults: the right bits on every rank, or the cause on every rank that still runs.

Never a hang, never a wrong number. A failing example prints the world that it ran in: a line that replays it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
from blame import may_cause
from conversations import Record, Step, Together, addend, conversations, model
from hypothesis import given, note
from hypothesis import strategies as st
from strategies import WorldCase, worlds

from transports import (
    LoopbackWorld,
    Task,
    Transport,
    TransportError,
    TransportTimeout,
    UndeliveredMessage,
    Wait,
)
from transports.buffers import bytes_of
from transports.contract import Letter
from transports.faults import Damages, Dies, Fault, Stalls

TIMEOUT = 10.0
DURATION, LATENCY, BANDWIDTH = 1 / 16, 1 / 64, 4096.0
Follow = Callable[[Transport, Sequence[Step], Record], Task[None]]


@dataclass(frozen=True)
class Plan:
    """What is said, in which world, and what goes wrong."""

    world_size: int
    steps: tuple[Step, ...]
    case: WorldCase
    faults: tuple[Fault, ...]

    def build(self) -> LoopbackWorld:
        """A new world, in checked mode and with a timeout."""
        return LoopbackWorld(
            self.world_size,
            capacity=self.case.capacity,
            lanes=self.case.lanes,
            seed=self.case.seed,
            latency_seconds=LATENCY,
            bandwidth_bytes_per_second=BANDWIDTH,
            durations=DURATION,
            timeout_seconds=TIMEOUT,
            check_messages=True,
            faults=self.faults,
        )

    @property
    def latest(self) -> float:
        """By when everything is over, if whatever is over takes its time, and whatever is not times out."""
        stalled = sum(fault.seconds or 0.0 for fault in self.faults if isinstance(fault, Stalls))
        sent = sum(isinstance(step, Letter) for step in self.steps)
        at_most = len(self.steps) * (DURATION + LATENCY + 1024 / BANDWIDTH) + sent * 1024 / BANDWIDTH
        return at_most + stalled + TIMEOUT


@st.composite
def faults(draw: st.DrawFn, world_size: int, steps: Sequence[Step]) -> Fault:
    """A fault that mostly has something to hit."""
    links = Counter((step.source, step.to) for step in steps if isinstance(step, Letter))
    if not links or draw(st.integers(0, 2)) == 0:
        rank, number = draw(st.integers(0, world_size - 1)), draw(st.integers(0, len(steps)))
        when = draw(st.sampled_from(["before", "in", "after"]))
        return Dies(rank, when, draw(st.sampled_from(["communication", "instruction"])), number)
    source, to = draw(st.sampled_from(sorted(links)))
    message = draw(st.integers(0, links[source, to] - 1))
    if draw(st.booleans()):
        return Stalls(source, to, message, draw(st.sampled_from([None, 0.5, 3.0, 9.0, 30.0])))
    how = draw(st.sampled_from(["cut", "flip", "flip", "double", "shape"]))
    return Damages(source, to, message, how, bit=draw(st.integers(0, 1000)) if how == "flip" else 0)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    world_size, steps = draw(conversations())
    some = draw(st.lists(faults(world_size, steps), min_size=1, max_size=3))
    return Plan(world_size, tuple(steps), draw(worlds()), tuple(some))


def in_turn(transport: Transport, steps: Sequence[Step], record: Record) -> Task[None]:
    """Wait for each step before the next."""
    for index, step in enumerate(steps):
        transport.stand_at(f"step {index}")
        if isinstance(step, Together):
            total = transport.all_sum(addend(step, transport.rank), f"sum {index}")
            yield from timed(transport, total)
            record.append(bytes_of(total.array).tobytes())
        elif step.source == transport.rank:
            yield from timed(transport, transport.send(step.values(), step.to, f"letter {index}"))
        elif step.to == transport.rank:
            receive = transport.receive(step.shape, step.dtype, step.source, f"letter {index}")
            yield from timed(transport, transport.arrive(receive))
            record.append(bytes_of(receive.array).tobytes())
    yield from timed(transport, transport.flush())


def in_the_background(transport: Transport, steps: Sequence[Step], record: Record) -> Task[None]:
    """Ask for all that comes before the next sum, then wait for it; sends are not waited for at all."""
    asked = list[tuple[Wait, Callable[[], mx.array]]]()
    for index, step in enumerate(steps):
        transport.stand_at(f"step {index}")
        if isinstance(step, Letter) and step.source == transport.rank:
            transport.send(step.values(), step.to, f"letter {index}")
        elif isinstance(step, Letter) and step.to == transport.rank:
            receive = transport.receive(step.shape, step.dtype, step.source, f"letter {index}")
            asked.append((transport.arrive(receive), lambda receive=receive: receive.array))
        elif isinstance(step, Together):
            total = transport.all_sum(addend(step, transport.rank), f"sum {index}")
            asked.append((total, lambda total=total: total.array))
            yield from taken(transport, asked, record)
    yield from taken(transport, asked, record)


def taken(transport: Transport, asked: list[tuple[Wait, Callable[[], mx.array]]], record: Record) -> Task[None]:
    for wait, array in asked:
        yield from timed(transport, wait)
        record.append(bytes_of(array()).tobytes())
    asked.clear()


def timed(transport: Transport, wait: Wait) -> Task[None]:
    """Wait, and see that it takes no longer than the timeout, and exactly that if it is a timeout of its own."""
    since = transport.clock()
    try:
        yield wait
    except TransportTimeout as error:
        is_word = error.__cause__ is not None
        assert is_word or transport.clock() - since == TIMEOUT
        raise
    assert transport.clock() - since <= TIMEOUT


def carry_out(world: LoopbackWorld, plan: Plan, follow: Follow) -> tuple[list[Record], TransportError | None]:
    """What each rank got, and what ended the run."""
    note(repr(world))
    records: list[Record] = [[] for _ in world.local_ranks]
    tasks = {rank: follow(world.transport(rank), plan.steps, records[rank]) for rank in world.local_ranks}
    try:
        world.run(tasks)
    except TransportError as cause:
        return records, cause
    return records, None


def check(plan: Plan, follow: Follow) -> None:
    world = plan.build()
    records, cause = carry_out(world, plan, follow)
    expected = model(plan.world_size, plan.steps)
    assert max(world.transport(rank).clock() for rank in world.local_ranks) <= plan.latest
    if cause is None:
        assert records == expected
        return
    assert may_cause(cause, plan.faults), cause
    failed = [rank for rank, outcome in world.outcomes.items() if isinstance(outcome, Exception)]
    assert failed or isinstance(cause, UndeliveredMessage)
    assert sorted(world.outcomes) == list(world.local_ranks)
    for rank, record in enumerate(records):
        assert record == expected[rank][: len(record)]
        if rank in failed:
            assert str(cause) in str(world.outcomes[rank])
        else:
            assert record == expected[rank]


@given(plans())
def test_the_right_bits_or_the_cause(plan: Plan) -> None:
    check(plan, in_turn)


@given(plans())
def test_the_right_bits_or_the_cause_when_nothing_is_waited_for_at_once(plan: Plan) -> None:
    check(plan, in_the_background)


@given(plans())
def test_a_run_is_replayed_from_its_line(plan: Plan) -> None:
    world = plan.build()
    records, cause = carry_out(world, plan, in_turn)
    again = eval(repr(world), {"LoopbackWorld": LoopbackWorld, "Dies": Dies, "Stalls": Stalls, "Damages": Damages})
    records_again, cause_again = carry_out(again, plan, in_turn)
    assert (records_again, str(cause_again)) == (records, str(cause))
    assert again.log == world.log
    assert [str(again.outcomes[rank]) for rank in world.outcomes] == [str(each) for each in world.outcomes.values()]


@given(conversations(), worlds(), st.integers(0, 2**16))
def test_the_interleaving_changes_no_clock(conversation: tuple[int, list[Step]], case: WorldCase, seed: int) -> None:
    """Without faults, bits and times are a matter of the program alone."""
    world_size, steps = conversation
    clocks = list[list[float]]()
    for other in (case.seed, seed):
        plan = Plan(world_size, tuple(steps), WorldCase(case.capacity, case.lanes, other), ())
        world = plan.build()
        assert carry_out(world, plan, in_turn) == (model(world_size, steps), None)
        clocks.append([world.transport(rank).clock() for rank in world.local_ranks])
    assert clocks[0] == clocks[1]
