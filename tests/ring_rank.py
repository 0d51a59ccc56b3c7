"""What a rank of the ring tests runs: `python tests/ring_rank.py CASE[:ARGUMENT] [LANES] [MAX_PIECE_BYTES] [checked]`.

Its last line is what the test looks for, since a launcher's exit code says little.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial

import mlx.core as mx

from transports.base import Task, Transport
from transports.buffers import bytes_of
from transports.contract import PROMISES, in_one_run, keeps_to_neighbours
from transports.deliveries import arrives_beyond_two_gigabytes
from transports.distributed import TIMEOUT_SECONDS
from transports.endings import ENDINGS
from transports.errors import TransportClosed, TransportError
from transports.header import Header
from transports.ring import RingWorld
from transports.watch import end_process
from transports.wire import MAX_PIECE_BYTES, Wire, evaluate

ENDING_TIMEOUT_SECONDS = 5.0
"""Of a world in which a rank is lost or silent."""


def contract(world: RingWorld) -> str:
    rank = world.local_ranks[0]
    kept = in_one_run(world.transport(rank))
    for promise in kept:
        print(promise.name, flush=True)
        world.run({rank: promise.check(world.transport(rank))})
    return f"kept {len(kept)} promises"


def promise(world: RingWorld, name: str) -> str:
    rank = world.local_ranks[0]
    [kept] = [promise for promise in PROMISES if promise.name == name]
    assert kept.concerns(world.transport(rank))
    world.run({rank: kept.check(world.transport(rank))})
    return "kept"


def ending(world: RingWorld, name: str) -> str:
    """The last rank is killed, or stopped; before, it says when."""
    rank = world.local_ranks[0]
    [promised] = [each for each in ENDINGS if each.name == name]
    number = signal.SIGKILL if promised.fate == "lost" else signal.SIGSTOP
    world.run({rank: promised.task(world.transport(rank), partial(_vanish, number))})
    return "nothing happened"


def _vanish(number: signal.Signals) -> None:
    print(time.monotonic(), flush=True)
    os.kill(os.getpid(), number)


def damaged_on_the_way(world: RingWorld) -> str:
    """Rank 0 changes a byte after the header was made, as a bad link would."""
    rank = world.local_ranks[0]
    try:
        world.run({rank: _damages(world.transport(rank))})
    except TransportError as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "was not noticed"


def peer_lost_in_a_receive(world: RingWorld) -> str:
    return _outlive_the_last(world, _receives_from_the_last)


def peer_lost_in_a_send(world: RingWorld) -> str:
    return _outlive_the_last(world, _sends_to_the_last)


def peer_lost_in_a_sum(world: RingWorld) -> str:
    return _outlive_the_last(world, _sums)


def stays_away_from_a_sum(world: RingWorld) -> str:
    """The last rank does something else, and says by beats that it is there."""
    rank, last = world.local_ranks[0], world.world_size - 1
    if rank == last:
        time.sleep(60)
    world.run({rank: _sums(world.transport(rank))})
    return "came about"


def many_pieces(world: RingWorld) -> str:
    rank = world.local_ranks[0]
    return str(world.run({rank: _to_and_fro(world.transport(rank))})[rank])


def task_fails_with_sends_under_way(world: RingWorld) -> str:
    rank = world.local_ranks[0]
    try:
        world.run({rank: _fails(world.transport(rank))})
    except ValueError as error:
        return f"ended by {error}"
    return "did not fail"


def never_waits_for_its_receive(world: RingWorld) -> str:
    rank = world.local_ranks[0]
    world.run({rank: _forgets(world.transport(rank))})
    return "was not told"


def neighbours(world: RingWorld) -> str:
    return _keep(world, keeps_to_neighbours)


def two_gigabytes(world: RingWorld) -> str:
    return _keep(world, arrives_beyond_two_gigabytes)


def sends_across(world: RingWorld) -> str:
    rank = world.local_ranks[0]
    try:
        world.transport(rank).send(mx.zeros((1,)), (rank + 2) % 4)
    except TransportError as error:
        return str(error)
    return "sent"


def _keep(world: RingWorld, check: Callable[[Transport], Task[None]]) -> str:
    rank = world.local_ranks[0]
    world.run({rank: check(world.transport(rank))})
    return "kept"


def _outlive_the_last(world: RingWorld, task: Callable[[Transport], Task[None]]) -> str:
    rank, last = world.local_ranks[0], world.world_size - 1
    transport = world.transport(rank)
    transport.stand_at("1F0 (instruction 7)")
    if rank == last:
        time.sleep(0.5)
        os._exit(0)
    try:
        world.run({rank: task(transport)})
    except TransportError as error:
        print(" | ".join(f"{type(error).__name__}: {error}".splitlines()))
    try:
        transport.send(mx.zeros((1,)), last)
    except TransportClosed as error:
        return f"closed: {error}".splitlines()[0]
    return "not closed"


def _receives_from_the_last(transport: Transport) -> Task[None]:
    yield transport.arrive(transport.receive((3,), mx.float32, transport.world_size - 1, "1B0"))


def _sends_to_the_last(transport: Transport) -> Task[None]:
    yield transport.send(mx.zeros((1 << 24,)), transport.world_size - 1, "0F0")
    yield transport.flush()


def _sums(transport: Transport) -> Task[None]:
    yield transport.all_sum(mx.zeros((3,)), "the norm")


def _to_and_fro(transport: Transport) -> Task[bool]:
    """From 0 to 1 and back, as four pieces and a rest, and summed."""
    array = mx.arange(4 * 1000 + 7, dtype=mx.int32).reshape(1, -1)
    if transport.rank == 0:
        yield transport.send(array, 1, "there or back")
    receive = transport.receive(array.shape, mx.int32, 1 - transport.rank, "there or back")
    doubled = receive.array * 2
    yield transport.arrive(receive)
    if transport.rank == 1:
        yield transport.send(receive.array, 0, "there or back")
    total = transport.all_sum(doubled, "both")
    yield total
    return mx.array_equal(total.array, array * 4).item() is True


def _fails(transport: Transport) -> Task[None]:
    """Rank 0 fails with a send under way that nobody takes."""
    if transport.rank == 0:
        transport.send(mx.zeros((1 << 24,)), 1, "0F0")
        raise ValueError("a mistake")
    time.sleep(1)
    raise ValueError("the other one")
    yield


def _damages(transport: Transport) -> Task[None]:
    values = mx.arange(1000, dtype=mx.int32)
    if transport.rank == 0:
        yield transport.send(values, 1, "0F0")
        yield transport.flush()
        header = Header.of(1, "0F1", values.shape, values.dtype, bytes_of(values))
        wire = Wire(mx.distributed.init(backend="ring"), MAX_PIECE_BYTES)
        evaluate(wire.send(header.encode(), 1))
        evaluate(wire.send(values + 1, 1))
    else:
        yield transport.arrive(transport.receive(values.shape, values.dtype, 0, "0F0"))
        yield transport.arrive(transport.receive(values.shape, values.dtype, 0, "0F1"))


def _forgets(transport: Transport) -> Task[None]:
    transport.arrive(transport.receive((1,), mx.int32, 1 - transport.rank, "1B0"))
    yield transport.flush()


def main() -> None:
    case, lanes, *more = (*sys.argv[1:], *["directional"][len(sys.argv) - 2 :])
    world = RingWorld(
        lanes="single" if lanes == "single" else "directional",
        max_piece_bytes=next((int(text) for text in more if text.isdecimal()), MAX_PIECE_BYTES),
        check_messages="checked" in more,
        timeout_seconds=ENDING_TIMEOUT_SECONDS if case.startswith(("ending:", "stays_away")) else TIMEOUT_SECONDS,
    )
    name, *arguments = case.split(":")
    try:
        print(globals()[name](world, *arguments), flush=True)
    except TransportError as error:
        if name != "ending":
            raise
        end_process(error)  # As a program does whose rank fails; MLX's own clean-up could not be relied on.
    world.close()


if __name__ == "__main__":
    main()
