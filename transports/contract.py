"""What a transport promises, one check for each promise, run by every rank from its own side.

There is no test framework in here and no exception for a backend: the same checks run in the loopback, in processes on
one machine, and on a user's machines. Each one is a task for a transport of its own run::

    world.run({rank: promise.check(world.transport(rank)) for rank in world.local_ranks})

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

from transports.base import Lanes, Task, Transport
from transports.buffers import bytes_of, fill
from transports.errors import BoundaryMismatch, TransportClosed, TransportError
from transports.header import dtype_name
from transports.letters import DTYPES, MIB, VIEWS, ContractBroken, Letter, around, exchange, expect_bits, pattern

__all__ = ["DTYPES", "MIB", "PROMISES", "ContractBroken", "Letter", "Promise", "in_one_run"]

GIB = 1 << 30
SIZES = (4, 64 * MIB, 1, 0, 20 * MIB)
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


def arrives_bit_for_bit_in_every_dtype(transport: Transport) -> Task[None]:
    """NaNs, infinities, -0.0, subnormals and all integers come as they were, scalars too."""
    shapes: list[tuple[int, ...]] = [(), (1,), (257,), (2, 3, 5)]
    pairs = around(transport.world_size)
    yield from exchange(transport, [Letter(*pair, s, d) for pair in pairs for d in DTYPES for s in shapes])


def arrives_whatever_its_size(transport: Transport) -> Task[None]:
    """0 bytes, 1 byte and 20 MB, in turn, so that nothing is taken for part of its neighbour."""
    shapes: list[tuple[int, ...]] = [(0,), (1,), (3, 0, 2), (20 * MIB,), (0,), (1,)]
    pairs = around(transport.world_size)
    letters = [Letter(*pair, s, mx.uint8, salt) for pair in pairs for salt, s in enumerate(shapes)]
    yield from exchange(transport, letters)


def arrives_beyond_two_gigabytes(transport: Transport) -> Task[None]:
    """A message of 2 GiB and 24 bytes comes whole, in however many pieces."""
    yield from exchange(transport, [Letter(0, 1, (2, (1 << 28) + 3), mx.int32)])


def arrives_though_not_contiguous(transport: Transport) -> Task[None]:
    """Transposed, strided and broadcast arrays come as what they show, not as what lies in memory."""
    for source, to in around(transport.world_size):
        for view in VIEWS:
            array = view(Letter(source, to, (6, 4), mx.int32).values())
            if transport.rank == source:
                yield transport.send(array, to, "a view")
            elif transport.rank == to:
                receive = transport.receive(array.shape, array.dtype, source, "a view")
                yield transport.arrive(receive)
                expect_bits(receive.array, array, f"[rank {to}] {view.__name__}")


def keeps_order_in_each_direction(transport: Transport) -> Task[None]:
    """Letters of one form, five at a time to and fro, come in the order in which they were sent."""
    bursts = [(pair, start) for start in range(0, 20, 5) for pair in around(transport.world_size)]
    letters = [Letter(*pair, (4,), mx.int32, start + salt) for pair, start in bursts for salt in range(5)]
    yield from exchange(transport, letters)


def evaluates_a_lazy_array_once(transport: Transport) -> Task[None]:
    """An array that nobody has evaluated yet is evaluated by the send, there and then, and is not computed again."""
    for source, to in around(transport.world_size):
        operand = Letter(source, to, (8, 8), mx.int32).values()
        expected = mx.cumsum(operand, axis=0)
        mx.eval(expected)
        if transport.rank == source:
            lazy = mx.cumsum(operand, axis=0)
            sent = transport.send(lazy, to, "lazy")
            fill(operand, bytes_of(mx.zeros_like(operand)))  # Whoever computes it from here on computes something else.
            expect_bits(lazy, expected, f"[rank {source}] the sender's own array, evaluated by its send")
            yield sent
        elif transport.rank == to:
            receive = transport.receive((8, 8), mx.int32, source, "lazy")
            yield transport.arrive(receive)
            expect_bits(receive.array, expected, f"[rank {to}] lazy")


def takes_the_value_at_the_call(transport: Transport) -> Task[None]:
    """What the sender does to its array afterwards does not reach the receiver."""
    for source, to in around(transport.world_size):
        values = Letter(source, to, (64, 1024), mx.int32).values()
        if transport.rank == source:
            array = Letter(source, to, (64, 1024), mx.int32).values()
            sent = transport.send(array, to, "changed after")
            array[...] = -1
            mx.eval(array)
            del array
            mx.eval(mx.full((64, 1024), -2))
            yield sent
        elif transport.rank == to:
            receive = transport.receive((64, 1024), mx.int32, source, "changed after")
            yield transport.arrive(receive)
            expect_bits(receive.array, values, f"[rank {to}] the sender's array, changed after it was sent")


def alternates_sizes_in_both_directions(transport: Transport) -> Task[None]:
    """4 bytes, 64 MB, 1 byte, 0 bytes and 20 MB, each answered by the next size."""
    answers = [*SIZES[1:], SIZES[0]]
    pairs = zip(SIZES, answers, strict=True)
    letters = [(Letter(0, 1, (a,), mx.uint8, i), Letter(1, 0, (b,), mx.uint8, i)) for i, (a, b) in enumerate(pairs)]
    yield from exchange(transport, [letter for pair in letters for letter in pair])


def sends_in_the_background(transport: Transport) -> Task[None]:
    """Both ranks send sizes that no buffer takes up, and only then receive."""
    yield from _send_first(transport, [(size,) for size in SIZES])


def sends_any_number_in_the_background(transport: Transport) -> Task[None]:
    """Sixty messages can be on their way to each side before anything is received."""
    yield from _send_first(transport, [(MIB // 2,)] * 60)


def _send_first(transport: Transport, shapes: Sequence[tuple[int, ...]]) -> Task[None]:
    letters = [Letter(*pair, s, mx.uint8, i) for pair in [(0, 1), (1, 0)] for i, s in enumerate(shapes)]
    yield from exchange(transport, [letter for letter in letters if letter.source == transport.rank])
    yield from exchange(transport, [letter for letter in letters if letter.to == transport.rank])
    yield transport.flush()


def receives_into_a_graph(transport: Transport) -> Task[None]:
    """A receive can be an operand, and a cotangent, before its data are there."""
    for source, to in around(transport.world_size):
        values = Letter(source, to, (4, 4), mx.int16).values().astype(mx.float32)
        if transport.rank == source:
            yield transport.send(values, to, "operand")
        elif transport.rank == to:
            receive = transport.receive((4, 4), mx.float32, source, "operand")
            product = receive.array @ receive.array
            _, gradients = mx.vjp(lambda x: mx.sin(x) * x, [mx.ones((4, 4))], [receive.array])
            yield transport.arrive(receive)
            expect_bits(product, values @ values, f"[rank {to}] a product built before its operand came")
            _, expected = mx.vjp(lambda x: mx.sin(x) * x, [mx.ones((4, 4))], [values])
            expect_bits(gradients[0], expected[0], f"[rank {to}] a gradient built before its cotangent came")


def orders_receives_by_their_arrival(transport: Transport) -> Task[None]:
    """Eight receives that are built first, in another order, and waited for together take the messages in order."""
    for source, to in around(transport.world_size):
        letters = [Letter(source, to, (16,), mx.int32, salt) for salt in range(8)]
        if transport.rank == source:
            yield from exchange(transport, letters)
        elif transport.rank == to:
            labels = [f"letter {index}" for index in reversed(range(8))]
            receives = [transport.receive((16,), mx.int32, source, label) for label in labels][::-1]
            total = mx.stack([receive.array for receive in receives])
            yield from [transport.arrive(receive) for receive in receives]
            expect_bits(total, mx.stack([letter.values() for letter in letters]), f"[rank {to}] eight at once")


def delivers_a_dropped_send(transport: Transport) -> Task[None]:
    """A send that its program does not wait for arrives."""
    for source, to in around(transport.world_size):
        letter = Letter(source, to, (1000,), mx.int32)
        if transport.rank == source:
            transport.send(letter.values(), to, "letter 0")
            yield transport.flush()
        elif transport.rank == to:
            yield from exchange(transport, [letter])


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
    """The sum over all ranks, in integers and floats that need no rounding, scalars too."""
    for dtype in (mx.int32, mx.float32, mx.bfloat16):
        for shape in [(), (1,), (5,), (3, 1001)]:
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
    Promise(arrives_bit_for_bit_in_every_dtype),
    Promise(arrives_whatever_its_size, message_bytes=20 * MIB),
    Promise(arrives_beyond_two_gigabytes, message_bytes=2 * GIB + 24),
    Promise(arrives_though_not_contiguous),
    Promise(keeps_order_in_each_direction),
    Promise(evaluates_a_lazy_array_once),
    Promise(takes_the_value_at_the_call),
    Promise(alternates_sizes_in_both_directions, message_bytes=64 * MIB),
    Promise(sends_in_the_background, lanes="directional", message_bytes=64 * MIB),
    Promise(sends_any_number_in_the_background, lanes="directional"),
    Promise(receives_into_a_graph),
    Promise(orders_receives_by_their_arrival),
    Promise(delivers_a_dropped_send),
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
