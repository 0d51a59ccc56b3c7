"""The loopback keeps the contract for every capacity, lane and interleaving, and explains what cannot work."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator

import mlx.core as mx
import numpy as np
import pytest
from backends import LOOPBACKS, Backend

from transports import (
    BoundaryMismatch,
    DeadlockError,
    LoopbackWorld,
    Task,
    Transport,
    TransportClosed,
    TransportError,
    UndeliveredMessage,
    Wait,
)
from transports.contract import (
    DTYPES,
    PROMISES,
    Promise,
)

LANES = ("single", "directional")
CAPACITIES = (None, 1, 0)
LIGHT = [promise for promise in PROMISES if not promise.is_heavy]


def run(world: LoopbackWorld, *tasks: Callable[[Transport], Task]) -> list:
    """One task for each rank, or the same one for all."""
    programs = tasks * world.world_size if len(tasks) == 1 else tasks
    results = world.run({rank: program(world.transport(rank)) for rank, program in enumerate(programs)})
    return [results[rank] for rank in world.local_ranks]


def idle(transport: Transport) -> Task[None]:
    return
    yield


@pytest.mark.parametrize("promise", LIGHT, ids=lambda promise: promise.name)
@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("backend", LOOPBACKS, ids=lambda backend: backend.name)
def test_contract(promise: Promise, backend: Backend, capacity: int | None) -> None:
    for world_size in backend.sizes(promise):
        run(LoopbackWorld(world_size, capacity=capacity, lanes=backend.lanes), promise.check)


@pytest.mark.skipif(not os.environ.get("PPTRAIN_HEAVY"), reason="takes 16 GiB of memory; asked for by PPTRAIN_HEAVY=1")
@pytest.mark.parametrize("backend", LOOPBACKS, ids=lambda backend: backend.name)
def test_heavy_promises_of_the_contract(backend: Backend) -> None:
    for promise in PROMISES:
        for world_size in backend.sizes(promise) if promise.is_heavy else ():
            run(LoopbackWorld(world_size, lanes=backend.lanes), promise.check)


@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("lanes", LANES)
def test_contract_under_other_interleavings(lanes: str, seed: int) -> None:
    for promise in PROMISES:
        world = LoopbackWorld(3, capacity=0, lanes=lanes, seed=seed)
        if promise.concerns(world.transport(0)) and not promise.is_large:
            run(world, promise.check)


def test_a_world_of_one_sums_alone() -> None:
    def task(transport: Transport) -> Task[float]:
        total = transport.all_sum(mx.array(3.0))
        yield total
        return total.array.item()

    assert run(LoopbackWorld(1), task) == [3.0]


def test_several_runs_one_after_another() -> None:
    def task(transport: Transport) -> Task[int]:
        total = transport.all_sum(mx.array(transport.rank))
        yield total
        return total.array.item()

    world = LoopbackWorld(3)
    assert [run(world, task) for _ in range(3)] == [[3, 3, 3]] * 3


def test_results_come_by_rank_whoever_ends_first() -> None:
    def task(transport: Transport) -> Task[int]:
        return transport.rank
        yield

    world = LoopbackWorld(4, seed=5)
    assert list(world.run({rank: task(world.transport(rank)) for rank in reversed(range(4))})) == [0, 1, 2, 3]


# What cannot go on is found and explained.


def _waits_for(peer: int, label: str, position: str) -> Callable[[Transport], Task[None]]:
    def task(transport: Transport) -> Task[None]:
        transport.stand_at(position)
        yield transport.arrive(transport.receive((1,), mx.float32, peer, label))

    return task


def test_a_deadlock_says_where_each_rank_stands() -> None:
    with pytest.raises(DeadlockError) as deadlock:
        run(
            LoopbackWorld(2),
            _waits_for(1, "1B0", "0B0 (instruction 4)"),
            _waits_for(0, "0F0", "1F0 (instruction 0)"),
        )
    assert str(deadlock.value) == (
        "No rank can go on:\n"
        "  rank 0 stands at 0B0 (instruction 4) and waits for 1B0 from rank 1\n"
        "  rank 1 stands at 1F0 (instruction 0) and waits for 0F0 from rank 0"
    )


def test_a_deadlock_says_who_has_ended() -> None:
    with pytest.raises(DeadlockError, match=r"rank 0 stands at A and waits for 1B0 from rank 1\n  rank 1 has ended"):
        run(LoopbackWorld(2), _waits_for(1, "1B0", "A"), idle)


def _sends_first(transport: Transport) -> Task[None]:
    peer = 1 - transport.rank
    yield transport.send(mx.zeros((1,)), peer, f"from {transport.rank}")
    yield transport.arrive(transport.receive((1,), mx.float32, peer))


@pytest.mark.parametrize(
    ("lanes", "capacity", "can_go_on"),
    [
        ("single", None, True),
        ("single", 1, True),
        ("single", 0, False),
        ("directional", None, True),
        ("directional", 1, True),
        ("directional", 0, True),
    ],
)
def test_who_can_send_first(lanes: str, capacity: int | None, can_go_on: bool) -> None:
    world = LoopbackWorld(2, capacity=capacity, lanes=lanes)
    if can_go_on:
        run(world, _sends_first)
    else:
        with pytest.raises(
            DeadlockError, match="rank 0 stands at its beginning and waits for from 0 to leave for rank 1"
        ):
            run(world, _sends_first)


def test_nobody_receives_while_it_flushes() -> None:
    """A ring takes a message when its receiver waits for it, and only then: so does a rendezvous."""

    def task(transport: Transport) -> Task[None]:
        peer = 1 - transport.rank
        transport.send(mx.zeros((1,)), peer, "large")
        arrived = transport.arrive(transport.receive((1,), mx.float32, peer))
        yield transport.flush()
        yield arrived

    run(LoopbackWorld(2, capacity=1), task)
    with pytest.raises(DeadlockError, match="waits for large to leave for rank 1"):
        run(LoopbackWorld(2, capacity=0), task)


def test_a_single_lane_is_in_line_behind_what_was_asked_for_before() -> None:
    def task(transport: Transport) -> Task[None]:
        transport.send(mx.zeros((1,)), 1 - transport.rank, "0F0")
        yield transport.arrive(transport.receive((1,), mx.float32, 1 - transport.rank, "1B0"))

    with pytest.raises(DeadlockError, match="waits for 1B0 from rank 1, in line behind 0F0 to leave for rank 1"):
        run(LoopbackWorld(2, capacity=0, lanes="single"), task)


def _sends(label: str, count: int = 1) -> Callable[[Transport], Task[None]]:
    def task(transport: Transport) -> Task[None]:
        for index in range(count):
            yield transport.send(mx.zeros((2, 3)), 1, f"{label}{index}")

    return task


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("lanes", LANES)
def test_a_message_left_over_is_named(lanes: str, capacity: int | None) -> None:
    world = LoopbackWorld(2, lanes=lanes, capacity=capacity)
    with pytest.raises(TransportError, match="0F0") as error:
        run(world, _sends("0F"), idle)
    # A rendezvous with one lane never gets that far: its sender waits for a rank that has ended.
    assert isinstance(error.value, DeadlockError if (lanes, capacity) == ("single", 0) else UndeliveredMessage)


def test_a_message_left_over_is_named_with_its_form() -> None:
    with pytest.raises(UndeliveredMessage, match=re.escape("0F0 from rank 0 to rank 1, float32 (2, 3)")):
        run(LoopbackWorld(2), _sends("0F"), idle)


def test_a_receive_that_was_never_waited_for_is_named() -> None:
    def task(transport: Transport) -> Task[None]:
        transport.arrive(transport.receive((2, 3), mx.float32, 0, "0F0"))
        return
        yield

    with pytest.raises(UndeliveredMessage, match="rank 1 never got 0F0 from rank 0"):
        run(LoopbackWorld(2), _sends("0F"), task)


def test_a_message_on_the_wire_during_a_sum_is_named() -> None:
    """On a tagless link the receiver would take its bytes for part of the sum."""

    def sends(transport: Transport) -> Task[None]:
        yield transport.send(mx.zeros((1,)), 1, "0F0")
        yield transport.all_sum(mx.zeros((1,)), "norm")

    def receives_late(transport: Transport) -> Task[None]:
        yield transport.all_sum(mx.zeros((1,)), "norm")
        yield transport.arrive(transport.receive((1,), mx.float32, 0, "0F0"))

    with pytest.raises(UndeliveredMessage, match=r"come to norm, but nobody took:\n  0F0 from rank 0 to rank 1"):
        run(LoopbackWorld(2), sends, receives_late)


# A receive of another form is an error on the receiver.


@pytest.mark.parametrize(("shape", "dtype"), [((3, 2), mx.float32), ((2, 3), mx.int32), ((6,), mx.float32)])
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_another_shape_or_dtype_is_refused(capacity: int | None, shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    def receives(transport: Transport) -> Task[str]:
        receive = transport.receive(shape, dtype, 0, "0F0")
        try:
            yield transport.arrive(receive)
        except BoundaryMismatch as error:
            with pytest.raises(TransportClosed, match="its first error was"):
                transport.flush()
            return str(error)
        return "no error"

    message = run(LoopbackWorld(2, capacity=capacity), _sends("0F"), receives)[1]
    expected = f"{str(dtype).removeprefix('mlx.core.')} {shape}"
    assert message.startswith(f"[rank 1] rank 0 sent 0F0 as float32 (2, 3), but 0F0 expects {expected}.")


def test_sums_of_other_forms_are_refused() -> None:
    def task(transport: Transport) -> Task[None]:
        yield transport.all_sum(mx.zeros((1 + transport.rank,)), "norm")

    with pytest.raises(BoundaryMismatch, match=re.escape("rank 0 float32 (1,) (norm), rank 1 float32 (2,) (norm)")):
        run(LoopbackWorld(2), task)


# A receive is poison until it is filled, in place.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_receive_is_poison_before_and_the_same_array_after(dtype: mx.Dtype) -> None:
    def sends(transport: Transport) -> Task[None]:
        yield transport.send(mx.zeros((2, 2), dtype=dtype), 1)

    def receives(transport: Transport) -> Task[None]:
        receive = transport.receive((2, 2), dtype, 0)
        array, sum_built_before = receive.array, receive.array.astype(mx.float32).sum()
        read_too_early = mx.array(array)
        mx.eval(read_too_early)
        before = np.array(read_too_early.astype(mx.float32))
        yield transport.arrive(receive)
        assert receive.array is array
        assert not mx.any(array).item()
        assert sum_built_before.item() == 0
        assert np.isnan(before).all() if mx.issubdtype(dtype, mx.floating) else (before == _greatest(dtype)).all()

    run(LoopbackWorld(2), sends, receives)


def _greatest(dtype: mx.Dtype) -> np.float32:
    return np.float32(1 if dtype == mx.bool_ else mx.iinfo(dtype).max)


def test_memory_that_the_sender_writes_to_afterwards_is_its_own() -> None:
    def sends(transport: Transport) -> Task[None]:
        array = mx.zeros((4,))
        mx.eval(array)
        sent, summed = transport.send(array, 1), transport.all_sum(array)
        np.asarray(array, copy=False)[:] = 7
        yield sent
        yield summed

    def receives(transport: Transport) -> Task[list[list[float]]]:
        receive = transport.receive((4,), mx.float32, 0)
        yield transport.arrive(receive)
        total = transport.all_sum(mx.ones((4,)))
        yield total
        return [receive.array.tolist(), total.array.tolist()]

    assert run(LoopbackWorld(2), sends, receives)[1] == [[0, 0, 0, 0], [1, 1, 1, 1]]


# A run is replayed from its seed.


def _events(world: LoopbackWorld) -> list[tuple[int, int]]:
    events: list[tuple[int, int]] = []

    def task(transport: Transport) -> Task[None]:
        right, left = (transport.rank + 1) % 3, (transport.rank - 1) % 3
        for index in range(10):
            events.append((transport.rank, index))
            yield transport.send(mx.array(index), right)
            yield transport.arrive(transport.receive((), mx.int32, left))

    run(world, task)
    return events


def test_the_same_seed_gives_the_same_order_of_events() -> None:
    orders = [_events(LoopbackWorld(3, seed=seed)) for seed in (0, 0, 1, 2)]
    assert orders[0] == orders[1]
    assert len({tuple(order) for order in orders}) == 3


# What goes wrong in one rank ends the run.


def test_a_task_that_raises_ends_the_others_at_their_waits() -> None:
    closed: list[int] = []

    def waits(transport: Transport) -> Task[None]:
        try:
            yield transport.arrive(transport.receive((1,), mx.float32, 1))
        finally:
            closed.append(transport.rank)

    def raises(transport: Transport) -> Task[None]:
        raise ValueError("a mistake")
        yield

    world = LoopbackWorld(3)
    with pytest.raises(ValueError, match="a mistake"):
        run(world, waits, raises, waits)
    assert closed in ([], [0], [2], [0, 2])  # Those that had begun.
    with pytest.raises(TransportClosed, match="the run ended with ValueError: a mistake"):
        world.transport(0).send(mx.zeros((1,)), 1)


def test_every_rank_needs_a_task() -> None:
    world = LoopbackWorld(2)
    with pytest.raises(ValueError, match=re.escape("a task for each of the ranks (0, 1), not for [0]")):
        world.run({0: idle(world.transport(0))})


@pytest.mark.parametrize("peer", [0, 2, -1])
def test_no_link_leads_to_oneself_or_outside(peer: int) -> None:
    transport = LoopbackWorld(2).transport(0)
    with pytest.raises(TransportError, match=f"no link leads to rank {peer}"):
        transport.send(mx.zeros((1,)), peer)
    with pytest.raises(TransportError, match=f"no link leads to rank {peer}"):
        transport.receive((1,), mx.float32, peer)


def test_a_receive_can_be_asked_for_once() -> None:
    transport = LoopbackWorld(2).transport(0)
    receive = transport.receive((1,), mx.float32, 1, "1B0")
    transport.arrive(receive)
    with pytest.raises(TransportError, match="twice for 1B0"):
        transport.arrive(receive)


def test_only_waits_of_the_transport_can_be_yielded() -> None:
    def task(transport: Transport) -> Generator[Wait, None, None]:
        yield "0F0"  # type: ignore[misc]

    with pytest.raises(TypeError, match="yielded '0F0'"):
        run(LoopbackWorld(1), task)


# Clocks.


class Timer:
    """A clock that a test moves on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def works(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("seed", range(4))
def test_a_rank_that_waits_takes_over_the_time_of_the_message(seed: int, capacity: int | None) -> None:
    timer = Timer()

    def works(transport: Transport) -> Task[float]:
        timer.works(2)
        yield transport.send(mx.zeros((1,)), 1)
        timer.works(8)
        return transport.clock()

    def waits(transport: Transport) -> Task[tuple[float, float]]:
        timer.works(1)
        arrived = transport.arrive(transport.receive((1,), mx.float32, 0))
        before = transport.clock()
        yield arrived
        return before, transport.clock()

    assert run(LoopbackWorld(2, seed=seed, capacity=capacity, timer=timer), works, waits) == [10, (1, 2)]


@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_work_at_once_take_as_long_as_the_slowest(seed: int) -> None:
    timer = Timer()

    def task(transport: Transport) -> Task[float]:
        timer.works(1 + transport.rank)
        yield transport.barrier()
        return transport.clock()

    assert run(LoopbackWorld(4, seed=seed, timer=timer), task) == [4, 4, 4, 4]


@pytest.mark.parametrize(("capacity", "ended_at"), [(None, 0), (1, 3), (0, 6)])
@pytest.mark.parametrize("seed", range(4))
def test_a_sender_waits_for_room_on_the_clock_too(seed: int, capacity: int | None, ended_at: float) -> None:
    timer = Timer()

    def sends(transport: Transport) -> Task[float]:
        yield transport.send(mx.zeros((1,)), 1)
        yield transport.send(mx.zeros((1,)), 1)
        return transport.clock()

    def receives_late(transport: Transport) -> Task[float]:
        for _ in range(2):
            timer.works(3)
            yield transport.arrive(transport.receive((1,), mx.float32, 0))
        return transport.clock()

    world = LoopbackWorld(2, lanes="single", capacity=capacity, seed=seed, timer=timer)
    assert run(world, sends, receives_late) == [ended_at, 6]


@pytest.mark.parametrize("seed", range(4))
def test_a_single_lane_takes_its_time_over_what_was_not_waited_for(seed: int) -> None:
    """Rank 0 cannot hand a message to rank 2 before it is rid of the one for rank 1, which comes late."""
    timer = Timer()

    def sends(transport: Transport) -> Task[float]:
        transport.send(mx.zeros((1,)), 1)
        yield transport.send(mx.zeros((1,)), 2)
        return transport.clock()

    def receives(transport: Transport) -> Task[float]:
        timer.works(3 if transport.rank == 1 else 0)
        yield transport.arrive(transport.receive((1,), mx.float32, 0))
        return transport.clock()

    world = LoopbackWorld(3, lanes="single", capacity=0, seed=seed, timer=timer)
    assert run(world, sends, receives, receives) == [3, 3, 3]
