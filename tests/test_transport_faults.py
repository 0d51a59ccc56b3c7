"""Each fault of a simulated world by hand: what its ranks see, word for word, and when."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress

import mlx.core as mx
import pytest

from transports import (
    BoundaryMismatch,
    DamagedMessage,
    DeadlockError,
    LoopbackWorld,
    PeerLost,
    RankDied,
    Task,
    Transport,
    TransportClosed,
    TransportError,
    TransportTimeout,
    UndeliveredMessage,
)
from transports.contract import PROMISES, Promise
from transports.faults import Damages, Dies, Fault, Stalls
from transports.header import HEADER_BYTES
from transports.links import Link, Message

LANES = ("single", "directional")
CAPACITIES = (None, 1, 0)


def pass_on(transport: Transport, count: int = 3) -> Task[list[list[float]]]:
    """A line of ranks: messages 0, 1, ... of two float32 go from the first to the last."""
    got = list[list[float]]()
    for index in range(count):
        transport.stand_at(f"step {index}")
        if transport.rank > 0:
            receive = transport.receive((2,), mx.float32, transport.rank - 1, f"m{index}")
            yield transport.arrive(receive)
            got.append(receive.array.tolist())
        if transport.rank < transport.world_size - 1:
            yield transport.send(mx.array([index, 0.5]), transport.rank + 1, f"m{index}")
    yield transport.flush()
    return got


def run(world: LoopbackWorld, *tasks: Callable[[Transport], Task]) -> list:
    """One task for each rank, or the same one for all."""
    programs = tasks * world.world_size if len(tasks) == 1 else tasks
    results = world.run({rank: program(world.transport(rank)) for rank, program in enumerate(programs)})
    return [results[rank] for rank in world.local_ranks]


def cause(world: LoopbackWorld, *tasks: Callable[[Transport], Task]) -> TransportError:
    """What ended the run."""
    with pytest.raises(TransportError) as error:
        run(world, *tasks or (pass_on,))
    return error.value


def line(*faults: Fault, **kwargs) -> LoopbackWorld:
    """Three ranks in a line, whose steps take a second each."""
    given = {"topology": "line", "durations": 1.0, "timeout_seconds": 10.0, "check_messages": True}
    return LoopbackWorld(3, faults=faults, **(given | kwargs))


RIGHT = [[], [[0, 0.5], [1, 0.5], [2, 0.5]], [[0, 0.5], [1, 0.5], [2, 0.5]]]


def test_without_faults_a_checked_world_gives_the_right_bits() -> None:
    assert run(line(), pass_on) == RIGHT


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.name)
@pytest.mark.parametrize("lanes", LANES)
def test_contract_in_a_ring_with_latency_and_bandwidth(promise: Promise, lanes: str) -> None:
    world = LoopbackWorld(3, lanes=lanes, topology="ring", latency_seconds=0.5, bandwidth_bytes_per_second=1e6)
    if promise.concerns(world.transport(0)):
        run(world, promise.check)


# A rank dies, and every other one hears who it was and where it stood.


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("when", ["before", "in", "after"])
@pytest.mark.parametrize(("part", "number", "place"), [("communication", 2, 1), ("instruction", 1, 1)])
def test_a_death_is_told_to_every_rank(when, part, number, place, capacity, lanes) -> None:
    world = line(Dies(1, when, part, number), capacity=capacity, lanes=lanes)
    died = cause(world)
    assert isinstance(died, RankDied)
    assert str(died) == f"[rank 1] died {when} its {part} {number}, standing at step {place}"
    assert world.outcomes[1] is died
    for rank in (0, 2):
        lost = world.outcomes[rank]
        if rank == 0 and lost == []:  # It had sent everything before.
            assert capacity is None
            continue
        assert isinstance(lost, PeerLost)
        assert lost.__cause__ is died
        assert str(lost).startswith(f"[rank {rank}] at ")
        assert str(lost).endswith(f": rank 1 has ended: {died}")


@pytest.mark.parametrize(("when", "has_left"), [("before", False), ("in", False), ("after", True)])
def test_whether_the_message_has_left_that_a_rank_died_over(when: str, has_left: bool) -> None:
    world = LoopbackWorld(2, faults=[Dies(0, when, "communication", 1)])
    cause(world)
    assert any(e.what == "has waited for m1 to leave for rank 1" for e in world.log) is has_left


def test_a_rank_that_dies_is_closed_at_that_place() -> None:
    places = list[str]()

    def dies(transport: Transport) -> Task[None]:
        try:
            transport.stand_at("0F0")
            places.append("before")
            transport.send(mx.zeros((1,)), 1)
            places.append("after")
            yield transport.flush()
        except Exception:
            places.append("an error that can be handled")
        finally:
            places.append("closed")

    cause(LoopbackWorld(2, faults=[Dies(0, "before", "communication", 0)]), dies, pass_on)
    assert places == ["before", "closed"]


@pytest.mark.parametrize(("when", "clock"), [("before", 2.0), ("in", 2.5), ("after", 3.0)])
def test_a_death_over_an_instruction_has_its_time(when: str, clock: float) -> None:
    world = line(Dies(0, when, "instruction", 2))
    assert str(cause(world)) == f"[rank 0] died {when} its instruction 2, standing at step 2"
    assert world.transport(0).clock() == clock
    assert all(world.transport(rank).clock() >= clock for rank in range(3))


def test_a_rank_can_die_after_its_last_instruction() -> None:
    assert str(cause(line(Dies(2, "after", "instruction", 2)))).startswith("[rank 2] died after its instruction 2")


def test_a_rank_that_had_ended_keeps_its_result() -> None:
    world = line(Dies(2, "before", "communication", 2), capacity=None, lanes="directional", seed=1)
    cause(world)
    ended = {rank for rank, outcome in world.outcomes.items() if not isinstance(outcome, Exception)}
    assert all(world.outcomes[rank] == RIGHT[rank] for rank in ended)
    assert 2 not in ended


def test_a_rank_whose_sends_have_not_left_is_not_over() -> None:
    """Its task has ended, but as a process it would still be delivering."""

    def sends(transport: Transport) -> Task[str]:
        transport.send(mx.zeros((2,)), 1, "m0")
        return "ended"
        yield

    def dies(transport: Transport) -> Task[None]:
        while True:
            transport.stand_at("computing")
            yield transport.flush()

    for seed in range(5):
        world = LoopbackWorld(2, capacity=0, faults=[Dies(1, "before", "instruction", 5)], seed=seed)
        cause(world, sends, dies)
        assert "rank 1 has ended: [rank 1] died before its instruction 5" in str(world.outcomes[0])


def test_the_first_death_is_the_one_that_is_told() -> None:
    world = line(Dies(0, "before", "instruction", 1), Dies(2, "after", "communication", 1))
    first = cause(world)
    assert all(str(first) in str(outcome) for outcome in world.outcomes.values() if outcome != [])


def test_whoever_lost_a_peer_is_closed() -> None:
    def goes_on(transport: Transport) -> Task[str]:
        try:
            yield transport.arrive(transport.receive((2,), mx.float32, 0, "m0"))
        except PeerLost:
            with pytest.raises(TransportClosed, match="its first error was"):
                transport.send(mx.zeros((1,)), 0)
        return "handled"

    world = LoopbackWorld(2, faults=[Dies(0, "before", "communication", 0)])
    assert isinstance(cause(world, pass_on, goes_on), RankDied)
    assert world.outcomes[1] in ("handled",) or isinstance(world.outcomes[1], PeerLost)  # It may not have begun.


def test_whoever_waits_again_after_the_end_is_closed() -> None:
    def stubborn(transport: Transport) -> Task[None]:
        arrived = transport.arrive(transport.receive((2,), mx.float32, 0, "m0"))
        while True:
            with suppress(PeerLost):
                yield arrived

    world = LoopbackWorld(2, faults=[Dies(0, "in", "communication", 0)])
    died = cause(world, pass_on, stubborn)
    assert str(died) in str(world.outcomes[1])


def test_an_error_of_a_task_is_told_with_its_name() -> None:
    def raises(transport: Transport) -> Task[None]:
        transport.stand_at("0F0")
        raise ValueError("a mistake")
        yield

    world = LoopbackWorld(2)
    with pytest.raises(ValueError, match="a mistake"):
        run(world, raises, lambda transport: transport_waits(transport, 0))
    assert isinstance(world.outcomes[1], PeerLost)
    assert "rank 0 has ended with ValueError: a mistake" in str(world.outcomes[1])


def transport_waits(transport: Transport, source: int) -> Task[None]:
    yield transport.arrive(transport.receive((2,), mx.float32, source, "m0"))


# A link stalls.


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_a_stall_within_the_timeout_only_takes_time(capacity: int | None, lanes: str) -> None:
    clocks = list[float]()
    for faults in ([], [Stalls(0, 1, 1, 3.0)]):
        world = line(*faults, capacity=capacity, lanes=lanes)
        assert run(world, pass_on) == RIGHT
        clocks.append(world.transport(2).clock())
    assert 0 < clocks[1] - clocks[0] <= 3.0


@pytest.mark.parametrize("seconds", [None, 11.0])
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_what_a_stalled_link_holds_back_times_out(capacity: int | None, lanes: str, seconds: float | None) -> None:
    world = line(Stalls(0, 1, 1, seconds), capacity=capacity, lanes=lanes)
    late = cause(world)
    assert isinstance(late, TransportTimeout)
    assert re.match(
        r"\[rank 0\] at step \d: waited 10 s for (m1|its sends) to leave( for rank 1)?, in vain"
        r"|\[rank 1\] at step 1: waited 10 s for m1 from rank 0, in vain",
        str(late),
    )
    for rank, outcome in world.outcomes.items():
        assert outcome is late or str(outcome).endswith(f"has ended with TransportTimeout: {late}"), rank


def test_a_timeout_is_that_long() -> None:
    world = LoopbackWorld(2, faults=[Stalls(0, 1, 0)], timeout_seconds=10.0, durations=2.0)
    sends = lambda transport: pass_on(transport, 1)  # noqa: E731
    cause(world, sends, sends)
    assert [world.transport(rank).clock() for rank in range(2)] == [12.0, 12.0]


def test_a_link_that_stands_still_is_named_where_there_is_no_timeout() -> None:
    stuck = cause(line(Stalls(0, 1, 1), timeout_seconds=None))
    assert isinstance(stuck, DeadlockError)
    assert "rank 1 stands at step 1 and waits for m1 from rank 0" in str(stuck)
    assert str(stuck).endswith("  the link from rank 0 to rank 1 stands still before message 1")


def test_a_deadlock_is_no_timeout() -> None:
    """Nothing has been sent that the stalled link could hold back."""
    world = line(Stalls(0, 1, 0))
    stuck = cause(world, *[lambda transport: transport_waits(transport, 1 if transport.rank != 1 else 0)] * 3)
    assert isinstance(stuck, DeadlockError)
    assert {str(outcome) for outcome in world.outcomes.values()} == {str(stuck)}


def test_a_sum_that_is_late_names_who_came_last() -> None:
    def sums(transport: Transport) -> Task[None]:
        transport.stand_at("slow" if transport.rank == 2 else "quick")
        yield transport.all_sum(mx.zeros((1,)), "norm")

    late = cause(LoopbackWorld(3, durations={"slow": 20.0, "quick": 1.0}.get, timeout_seconds=10.0), sums)
    assert "waited 10 s for every rank to come to norm, of which rank 2 came last, in vain" in str(late)


# A message is damaged.


CHECKED = {
    "cut": (DamagedMessage, "message 1, m1, float32 (2,) was sent with the checksum"),
    "flip": (DamagedMessage, "message 1, m1, float32 (2,) was sent with the checksum"),
    "double": (
        BoundaryMismatch,
        "the sender says message 1, m1, float32 (2,), but the receiver expects message 2, m2, float32 (2,)",
    ),
    "shape": (
        BoundaryMismatch,
        "the sender says message 1, m1, float32 (1, 2), but the receiver expects message 1, m1, float32 (2,)",
    ),
}


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("how", CHECKED)
def test_damage_is_seen_in_checked_mode(how, lanes, capacity) -> None:
    world = line(Damages(0, 1, 1, how, bit=40), lanes=lanes, capacity=capacity)
    damaged = cause(world)
    kind, words = CHECKED[how]
    assert type(damaged) is kind
    assert str(damaged).startswith(f"[rank 1] m1 from rank 0: {words}")
    for outcome in world.outcomes.values():
        assert outcome == [] or str(damaged) in str(outcome)


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("cut", DamagedMessage, "[rank 1] m1 from rank 0: it came with 4 bytes, and was sent with 8."),
        ("shape", BoundaryMismatch, "[rank 1] rank 0 sent m1 as float32 (1, 2), but m1 expects float32 (2,)."),
    ],
)
def test_another_size_or_shape_is_seen_unchecked_too(how: str, kind: type, words: str) -> None:
    damaged = cause(line(Damages(0, 1, 1, how), check_messages=False))
    assert type(damaged) is kind
    assert str(damaged).startswith(words)


def test_a_flipped_bit_is_not_seen_unchecked() -> None:
    """What checked mode is for."""
    assert run(line(Damages(0, 1, 1, "flip", bit=63), check_messages=False), pass_on)[1][1] == [1, -0.5]


@pytest.mark.parametrize("how", ["cut", "flip"])
def test_an_empty_message_has_nothing_to_damage(how: str) -> None:
    def task(transport: Transport) -> Task[None]:
        if transport.rank == 0:
            yield transport.send(mx.zeros((0,)), 1)
        else:
            yield transport.arrive(transport.receive((0,), mx.float32, 0))

    run(LoopbackWorld(2, faults=[Damages(0, 1, 0, how)], check_messages=True), task)


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_the_last_message_doubled_is_left_over(capacity: int | None) -> None:
    left = cause(line(Damages(0, 1, 2, "double"), capacity=capacity))
    assert isinstance(left, UndeliveredMessage)
    assert "m2 from rank 0 to rank 1, float32 (2,)" in str(left)


@pytest.mark.parametrize("capacity", [1, 0])
def test_a_doubled_message_takes_no_more_room(capacity: int) -> None:
    link = Link(capacity, faults=[Damages(0, 1, 0, "double")])
    for index in range(3):
        assert link.has_room()
        link.carry(Message.of(mx.array(index), ""), at=index)
        assert not link.has_room()
        for _ in range(2 if index == 0 else 1):
            assert link.take(at=index)[0].array().item() == index


def test_labels_are_compared_in_checked_mode() -> None:
    def sends(transport: Transport) -> Task[None]:
        yield transport.send(mx.zeros((2,)), 1, "0F0")

    def task(transport: Transport) -> Task[None]:
        yield from transport_waits(transport, 0)

    mixed_up = cause(LoopbackWorld(2, check_messages=True), sends, task)
    assert "the sender says message 0, 0F0, float32 (2,), but the receiver expects message 0, m0" in str(mixed_up)
    run(LoopbackWorld(2), sends, task)


@pytest.mark.parametrize("fault", [Dies(3, "in", "instruction", 0), Stalls(0, 2, 0), Damages(1, 1, 0, "cut")])
def test_a_fault_needs_its_place(fault: Fault) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{fault!r} has no such place in this world")):
        line(fault)


# Topologies.


@pytest.mark.parametrize(
    ("topology", "expected"), [("mesh", [0, 1, 3, 4]), ("ring", [1, 3]), ("line", [1, 3]), ("round", None)]
)
def test_which_links_there_are(topology: str, expected: list[int] | None) -> None:
    if expected is None:
        with pytest.raises(ValueError, match=r"no topology 'round'\. There are: mesh, ring, line"):
            LoopbackWorld(5, topology=topology)
        return
    transport = LoopbackWorld(5, topology=topology).transport(2)
    for peer in range(5):
        if peer in expected:
            transport.receive((1,), mx.float32, peer)
            continue
        words = f"[rank 2] no link leads to rank {peer}. In this {topology} of 5 links lead to {expected}."
        with pytest.raises(TransportError, match=re.escape(words)):
            transport.send(mx.zeros((1,)), peer)


def test_a_ring_goes_round_and_a_line_does_not() -> None:
    LoopbackWorld(4, topology="ring").transport(3).receive((1,), mx.float32, 0)
    with pytest.raises(TransportError, match=re.escape("In this line of 4 links lead to [2].")):
        LoopbackWorld(4, topology="line").transport(3).receive((1,), mx.float32, 0)


# The virtual clock of links: latency, bandwidth, and given durations.


def clocks(world: LoopbackWorld, *tasks: Callable[[Transport], Task]) -> list[float]:
    run(world, *tasks)
    return [world.transport(rank).clock() for rank in world.local_ranks]


def two(**kwargs) -> LoopbackWorld:
    return LoopbackWorld(2, durations=0.0, latency_seconds=0.5, bandwidth_bytes_per_second=4.0, **kwargs)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("lanes", LANES)
def test_a_message_takes_its_bytes_over_the_bandwidth_and_the_latency(lanes, capacity, seed) -> None:
    """8 bytes at 4 a second leave in 2 s, one message behind the other, and are there half a second later."""
    assert (
        clocks(two(lanes=lanes, capacity=capacity, seed=seed), pass_on)
        == {
            # A rendezvous begins when the receiver has the one before: 0, 2.5, 5.
            0: [7.0, 7.5],
            # One message on the link: the next begins when it has been taken, which is the same.
            1: [7.0, 7.5],
            None: [6.0, 6.5],
        }[capacity]
    )


def test_a_checked_message_carries_its_header() -> None:
    sends = lambda transport: pass_on(transport, 1)  # noqa: E731
    assert clocks(two(check_messages=True), sends)[1] == (8 + HEADER_BYTES) / 4 + 0.5


def test_latencies_and_bandwidths_of_single_links() -> None:
    world = LoopbackWorld(
        3, durations=0.0, latency_seconds={(0, 1): 1.0}, bandwidth_bytes_per_second={(1, 2): 2.0}, topology="line"
    )
    assert clocks(world, lambda transport: pass_on(transport, 1)) == [0.0, 5.0, 5.0]


def test_a_sum_takes_as_long_as_the_slowest_link() -> None:
    world = LoopbackWorld(3, durations=lambda position: float(position), latency_seconds={(0, 1): 0.25, (2, 0): 2.0})

    def task(transport: Transport) -> Task[None]:
        transport.stand_at(f"{transport.rank}")
        yield transport.all_sum(mx.zeros((4,)))

    assert clocks(world, task) == [4.0, 4.0, 4.0]


def test_durations_are_given_by_position() -> None:
    """The times of a pipeline of two stages, as a schedule's picture has them."""
    seconds = {"0F0": 1.0, "1F0": 2.0, "1B0": 4.0, "0B0": 8.0}
    spans = dict[str, tuple[float, float]]()

    def act(transport: Transport, action: str) -> None:
        start = transport.clock()
        transport.stand_at(action)
        spans[action] = (start, transport.clock())

    def first(transport: Transport) -> Task[None]:
        act(transport, "0F0")
        yield transport.send(mx.zeros((1,)), 1, "0F0")
        yield transport.arrive(transport.receive((1,), mx.float32, 1, "1B0"))
        act(transport, "0B0")

    def second(transport: Transport) -> Task[None]:
        yield transport.arrive(transport.receive((1,), mx.float32, 0, "0F0"))
        act(transport, "1F0")
        act(transport, "1B0")
        yield transport.send(mx.zeros((1,)), 0, "1B0")

    run(LoopbackWorld(2, durations=seconds.__getitem__, latency_seconds=0.5), first, second)
    assert spans == {"0F0": (0.0, 1.0), "1F0": (1.5, 3.5), "1B0": (3.5, 7.5), "0B0": (8.0, 16.0)}


def test_a_flush_lasts_until_the_last_byte_has_left() -> None:
    def sends(transport: Transport) -> Task[None]:
        transport.send(mx.zeros((2,)), 1, "m0")
        yield transport.send(mx.zeros((0,)), 1, "m1")  # So that both have moved before the flush is asked for.
        yield transport.flush()

    def receives(transport: Transport) -> Task[None]:
        yield transport.arrive(transport.receive((2,), mx.float32, 0, "m0"))
        yield transport.arrive(transport.receive((0,), mx.float32, 0, "m1"))

    assert clocks(two(), sends, receives) == [2.0, 2.5]


@pytest.mark.parametrize("seed", range(4))
def test_a_sum_begins_when_what_was_sent_before_has_left(seed: int) -> None:
    def sends(transport: Transport) -> Task[None]:
        yield transport.send(mx.zeros((2,)), 1, "m0")
        yield transport.barrier()

    def receives(transport: Transport) -> Task[None]:
        transport.arrive(transport.receive((2,), mx.float32, 0, "m0"))
        yield transport.barrier()

    # 2 s for the bytes, 0.5 s for the latency, and then 4 bytes and the latency again for the barrier.
    assert clocks(two(seed=seed), sends, receives) == [4.0, 4.0]


# The log.


def test_the_log_says_what_happened_and_when() -> None:
    world = LoopbackWorld(2, durations=1.0, latency_seconds=0.5, faults=[Dies(1, "after", "communication", 0)])
    cause(world, lambda transport: pass_on(transport, 1))
    events = {(event.seconds, event.rank, event.what) for event in world.log}
    assert {
        (0.0, 0, "stands at step 0"),
        (1.0, 0, "asks for m0 to leave for rank 1"),
        (1.0, 1, "asks for m0 from rank 0"),
        (1.5, 1, "has waited for m0 from rank 0"),
    } <= events
    assert any(event.what == "died after its communication 0" for event in world.log)
    assert str(world.log[0]).startswith("    0.000000 s  rank ")


@pytest.mark.parametrize("fault", [Dies(1, "in", "communication", 3), Stalls(0, 1, 2), Damages(1, 2, 0, "flip")])
def test_the_log_is_the_same_for_the_same_seed_and_faults(fault: Fault) -> None:
    logs = list[list[str]]()
    for seed in (0, 0, 1):
        world = line(fault, seed=seed)
        cause(world)
        logs.append([str(event) for event in world.log])
    assert logs[0] == logs[1] != logs[2]


def test_the_line_of_a_world_makes_it_again() -> None:
    world = line(Stalls(0, 1, 2, seconds=1.0), seed=7, capacity=1, lanes="single")
    assert repr(world) == (
        "LoopbackWorld(3, capacity=1, lanes='single', seed=7, topology='line', latency_seconds=0.0, "
        "bandwidth_bytes_per_second=None, durations=1.0, timeout_seconds=10.0, check_messages=True, "
        "faults=(Stalls(source=0, to=1, message=2, seconds=1.0),))"
    )
    assert repr(eval(repr(world))) == repr(world)
