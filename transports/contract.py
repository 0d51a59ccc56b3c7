"""What a transport promises, one check for each promise, run by every rank from its own side.

There is no test framework in here and no exception for a backend: the same checks run in the loopback, in processes on
one machine, and on a user's machines. Each one is a task for a transport of its own run::

    world.run({rank: promise.check(world.transport(rank)) for rank in world.local_ranks})

What becomes of the others when a rank ends or falls silent is promised in `endings`, since that ends the run.

Where ranks talk to each other, the messages stand in one list that all of them follow, each at its own end. That order
cannot deadlock, whatever the lanes and the capacity, so what hangs is the transport's fault. Both ends call a message
the same, since a transport that checks messages compares that too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from transports import deliveries
from transports.base import Lanes, Task, Transport
from transports.errors import BoundaryMismatch, TransportClosed, TransportError
from transports.header import dtype_name
from transports.letters import DTYPES, MIB, ContractBroken, Letter, around, exchange, expect_bits, pattern

__all__ = ["DTYPES", "MIB", "PROMISES", "ContractBroken", "Letter", "Promise", "in_one_run"]

GIB = 1 << 30
LATE_SECONDS = 0.05
"""How late a rank comes where ranks come late."""


@dataclass(frozen=True, slots=True)
class Promise:
    """One check, and which transports it speaks of."""

    check: Callable[[Transport], Task[None]]
    lanes: Lanes | None = None
    """The lanes that it speaks of; None if it holds for both."""
    message_bytes: int = MIB
    """Its messages are no larger than this."""
    is_of_checks: bool = False
    """Whether it speaks only of transports that check messages."""
    closes: bool = False
    """Whether it leaves the transport closed."""

    @property
    def name(self) -> str:
        """What is promised, in words that a report can show."""
        return self.check.__name__

    @property
    def is_large(self) -> bool:
        """Whether it takes more than a moment."""
        return self.message_bytes > MIB

    @property
    def is_heavy(self) -> bool:
        """Whether it is only to be run when asked for, on a machine with memory for several such messages."""
        return self.message_bytes > GIB

    def concerns(self, transport: Transport) -> bool:
        """Whether a transport with its lanes and checks makes this promise."""
        return self.lanes in (None, transport.lanes) and (transport.checks_messages or not self.is_of_checks)


def in_one_run(transport: Transport) -> list[Promise]:
    """The promises to check one after another on the same transport, the heavy ones not among them.

    Of those that close it, only the two at the end go together; each other one needs a run of its own.
    """
    light = [promise for promise in PROMISES if promise.concerns(transport) and not promise.is_heavy]
    return [promise for promise in light if not promise.closes] + list(PROMISES[-2:])


def sums_beside_messages(transport: Transport) -> Task[None]:
    """A hundred sums, each while messages to and from every neighbour are still asked for."""
    pairs = around(transport.world_size)
    for salt in range(100):
        letters = [Letter(*pair, (1 + salt * 7,), mx.int32, salt) for pair in pairs]
        receives = {}
        for letter in letters:
            if letter.source == transport.rank:
                transport.send(letter.values(), letter.to, f"beside sum {salt}")
            elif letter.to == transport.rank:
                receives[letter] = transport.receive(letter.shape, letter.dtype, letter.source, f"beside sum {salt}")
                transport.arrive(receives[letter])
        total = transport.all_sum(mx.full((3,), transport.rank + salt, dtype=mx.int32), f"sum {salt}")
        yield total
        expected = sum(range(transport.world_size)) + salt * transport.world_size
        expect_bits(total.array, mx.full((3,), expected, dtype=mx.int32), f"[rank {transport.rank}] sum {salt}")
        for letter, receive in receives.items():
            expect_bits(receive.array, letter.values(), f"[rank {transport.rank}] {letter}")


def sums_by_definition(transport: Transport) -> Task[None]:
    """The sum over all ranks, in integers and floats that need no rounding, scalars and empty arrays too."""
    for dtype in (mx.int32, mx.int64, mx.uint8, mx.float32, mx.float16, mx.bfloat16):
        for shape in [(), (1,), (0,), (5,), (3, 1001)]:
            count = int(np.prod(shape, dtype=np.int64))
            ramp = (mx.arange(count).reshape(shape) % 16).astype(dtype)
            total = transport.all_sum(ramp * (transport.rank + 1), "by definition")
            yield total
            factor = transport.world_size * (transport.world_size + 1) // 2
            expect_bits(total.array, ramp * factor, f"[rank {transport.rank}] sum of {dtype} {shape}")


def sums_whoever_comes_last(transport: Transport) -> Task[None]:
    """Each rank comes late once, and is part of the sum."""
    for late in range(transport.world_size):
        if transport.rank == late:
            time.sleep(LATE_SECONDS)
        total = transport.all_sum(mx.full((3,), 1 << transport.rank, dtype=mx.int32), f"rank {late} is late")
        yield total
        everybody = mx.full((3,), (1 << transport.world_size) - 1, dtype=mx.int32)
        expect_bits(total.array, everybody, f"[rank {transport.rank}] the sum to which rank {late} came late")


def sums_to_the_same_bits_on_every_rank(transport: Transport) -> Task[None]:
    """However a float sum is rounded, all ranks have the same one."""
    mine = pattern((1000,), mx.int16, salt=transport.rank).astype(mx.float32) / 7
    total = transport.all_sum(mine, "to be compared")
    yield total
    bits = total.array.view(mx.int32)
    halves = mx.stack([bits & 0xFFFF, (bits >> 16) & 0xFFFF])
    compared = transport.all_sum(halves, "comparison")
    yield compared
    expect_bits(compared.array, halves * transport.world_size, f"[rank {transport.rank}] the sum's bits, summed")


def keeps_barriers(transport: Transport) -> Task[None]:
    """Nobody leaves a barrier before all have come, whoever is last; several stand one after another."""
    for late in range(transport.world_size):
        came = transport.clock()
        yield transport.barrier()
        if transport.rank == late:
            time.sleep(LATE_SECONDS)
        yield transport.barrier()
        # Rank `late` slept between the two, so between coming to the first and leaving the second it is at least that.
        waited = transport.clock() - came
        if waited < 0.9 * LATE_SECONDS:
            raise ContractBroken(f"[rank {transport.rank}] left a barrier {waited} s on, before rank {late} had come")


def keeps_to_neighbours(transport: Transport) -> Task[None]:
    """Where no link leads, a rank is refused by name, and nothing breaks; where one leads, a letter comes."""
    ranks = range(transport.world_size)
    for nobody in (transport.rank, -1, transport.world_size):
        _expect_refusal(transport, nobody, lambda to: transport.send(mx.zeros((1,)), to))
        _expect_refusal(transport, nobody, lambda source: transport.receive((1,), mx.float32, source))
    across = {(source, to) for source in ranks for to in ranks if source != to} - set(around(transport.world_size))
    for pair in sorted(across):
        try:
            yield from exchange(transport, [Letter(*pair, (3,), mx.int32)])
        except TransportError as error:
            _expect_reason(transport, sum(pair) - transport.rank, error)
    yield transport.barrier()


def _expect_refusal(transport: Transport, peer: int, use: Callable[[int], object]) -> None:
    try:
        use(peer)
    except TransportError as error:
        _expect_reason(transport, peer, error)
    else:
        raise ContractBroken(f"[rank {transport.rank}] took a message to or from rank {peer}, where no link leads")


def _expect_reason(transport: Transport, peer: int, error: TransportError) -> None:
    if f"rank {peer}" not in str(error):
        raise ContractBroken(f"[rank {transport.rank}] refused rank {peer} without naming it: {error}") from error


def refuses_another_shape(transport: Transport) -> Task[None]:
    """Data of another shape are an error on the receiver, also where there are as many bytes."""
    yield from _refuses(transport, (3, 2), mx.float32)


def refuses_another_dtype(transport: Transport) -> Task[None]:
    """Data of another dtype are an error on the receiver, also where there are as many bytes."""
    yield from _refuses(transport, (2, 3), mx.int32)


def _refuses(transport: Transport, shape: Sequence[int], dtype: mx.Dtype) -> Task[None]:
    letter = Letter(0, 1, (2, 3), mx.float32)
    if transport.rank == 0:
        yield transport.send(letter.values(), 1, "of another form")
    elif transport.rank == 1:
        try:
            yield transport.arrive(transport.receive(shape, dtype, 0, "of another form"))
        except BoundaryMismatch as error:
            if f"{dtype_name(letter.dtype)} {letter.shape}" not in str(error):
                raise ContractBroken(f"[rank 1] does not say what rank 0 sent: {error}") from error
        else:
            raise ContractBroken(f"[rank 1] took float32 (2, 3) for {dtype_name(dtype)} {shape}")


def delivers_what_was_sent_before_close(transport: Transport) -> Task[None]:
    """Three messages that nobody waited for arrive, though their sender closes at once, and closes again."""
    letters = [Letter(0, 1, (1000,), mx.int32, salt) for salt in range(3)]
    if transport.rank == 0:
        for index, letter in enumerate(letters):
            transport.send(letter.values(), 1, f"letter {index}")
    elif transport.rank == 1:
        yield from exchange(transport, letters)
    transport.close()
    transport.close()


def refuses_work_after_close(transport: Transport) -> Task[None]:
    """Once closed, and closed again, a transport says so by an error of its own."""
    transport.close()
    transport.close()
    uses: list[Callable[[], object]] = [
        lambda: transport.send(mx.zeros((1,)), (transport.rank + 1) % transport.world_size),
        lambda: transport.receive((1,), mx.float32, (transport.rank + 1) % transport.world_size),
        lambda: transport.all_sum(mx.zeros((1,))),
        transport.barrier,
        transport.flush,
    ]
    for use in uses:
        try:
            use()
        except TransportClosed:
            continue
        raise ContractBroken(f"[rank {transport.rank}] was used after it was closed, and did not say so")
    yield from ()


PROMISES = (
    Promise(deliveries.arrives_bit_for_bit_in_every_dtype),
    Promise(deliveries.arrives_whatever_its_size, message_bytes=20 * MIB),
    Promise(deliveries.arrives_beyond_two_gigabytes, message_bytes=2 * GIB + 24),
    Promise(deliveries.arrives_though_not_contiguous),
    Promise(deliveries.keeps_order_in_each_direction),
    Promise(deliveries.evaluates_a_lazy_array_once),
    Promise(deliveries.takes_the_value_at_the_call),
    Promise(deliveries.alternates_sizes_in_both_directions, message_bytes=64 * MIB),
    Promise(deliveries.sends_in_the_background, lanes="directional", message_bytes=64 * MIB),
    Promise(deliveries.sends_any_number_in_the_background, lanes="directional"),
    Promise(deliveries.receives_into_a_graph),
    Promise(deliveries.orders_receives_by_their_arrival),
    Promise(deliveries.delivers_a_dropped_send),
    Promise(sums_beside_messages),
    Promise(sums_by_definition),
    Promise(sums_whoever_comes_last),
    Promise(sums_to_the_same_bits_on_every_rank),
    Promise(keeps_barriers),
    Promise(keeps_to_neighbours),
    Promise(refuses_another_shape, is_of_checks=True, closes=True),
    Promise(refuses_another_dtype, is_of_checks=True, closes=True),
    Promise(delivers_what_was_sent_before_close, closes=True),
    Promise(refuses_work_after_close, closes=True),
)
"""All promises; those that close the transport are the last."""
