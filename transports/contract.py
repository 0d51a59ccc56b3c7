"""What a transport promises, one check for each promise, run by every rank from its own side.

There is no test framework in here and no exception for a backend: the same checks run in the loopback, in processes on
one machine, and on a user's machines. Each one is a task for a transport of its own run::

    world.run({rank: promise.check(world.transport(rank)) for rank in world.local_ranks})

Where ranks talk to each other, the messages stand in one list that all of them follow, each at its own end. That order
cannot deadlock, whatever the lanes and the capacity, so what hangs is the transport's fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from transports.base import Lanes, Task, Transport
from transports.buffers import array_from, byte_count, bytes_of
from transports.errors import TransportClosed

DTYPES = (
    mx.float32,
    mx.float16,
    mx.bfloat16,
    mx.int8,
    mx.int16,
    mx.int32,
    mx.int64,
    mx.uint8,
    mx.uint16,
    mx.uint32,
    mx.uint64,
    mx.bool_,
)
MIB = 1 << 20


class ContractBroken(AssertionError):
    """A transport did not keep a promise."""


@dataclass(frozen=True, slots=True)
class Promise:
    """One check, and the lanes that it speaks of: None if it holds for both."""

    check: Callable[[Transport], Task[None]]
    lanes: Lanes | None = None

    @property
    def name(self) -> str:
        """What is promised, in words that a report can show."""
        return self.check.__name__

    def concerns(self, transport: Transport) -> bool:
        """Whether a transport with its lanes makes this promise."""
        return self.lanes in (None, transport.lanes)


@dataclass(frozen=True, slots=True)
class Letter:
    """A message between two neighbours whose values both ends can make for themselves."""

    source: int
    to: int
    shape: tuple[int, ...]
    dtype: mx.Dtype = mx.float32
    salt: int = 0

    def values(self) -> mx.array:
        """An evaluated array whose bits depend on who writes to whom, and on the salt."""
        return pattern(self.shape, self.dtype, salt=1 + self.source + 7 * self.to + 31 * self.salt)


def pattern(shape: Sequence[int], dtype: mx.Dtype, salt: int) -> mx.array:
    """Values of all bit patterns, NaNs and infinities included, that differ by salt."""
    # Repeated with a prime length, so that bytes which are shifted by any usual size are other bytes.
    period = np.random.default_rng(salt).integers(0, 256, 65521, dtype=np.uint8)
    data = np.resize(period, byte_count(shape, dtype))
    return array_from(data % 2 if dtype == mx.bool_ else data, shape, dtype)


def around(world_size: int) -> list[tuple[int, int]]:
    """Every directed pair of neighbours: to the right all the way round, then to the left."""
    right = [(rank, (rank + 1) % world_size) for rank in range(world_size)]
    return list(dict.fromkeys(right + [(to, source) for source, to in right]))


def expect_bits(received: mx.array, expected: mx.array, what: str) -> None:
    """Both arrays have the same shape, dtype and bits."""
    if received.shape != expected.shape or received.dtype != expected.dtype:
        raise ContractBroken(f"{what}: got {received.dtype} {received.shape}, not {expected.dtype} {expected.shape}")
    ours, theirs = bytes_of(received), bytes_of(expected)
    if not np.array_equal(ours, theirs):
        different = int(np.count_nonzero(ours != theirs))
        raise ContractBroken(
            f"{what}: {different} of {ours.size} bytes of {received.dtype} {received.shape} are others"
        )


def exchange(transport: Transport, letters: Sequence[Letter]) -> Task[None]:
    """Follow a list of letters at this rank's end, and check what comes."""
    for index, letter in enumerate(letters):
        if letter.source == transport.rank:
            yield transport.send(letter.values(), letter.to, f"letter {index}")
        elif letter.to == transport.rank:
            receive = transport.receive(letter.shape, letter.dtype, letter.source, f"letter {index}")
            yield transport.arrive(receive)
            expect_bits(receive.array, letter.values(), f"[rank {transport.rank}] {letter}")


def arrives_bit_for_bit_in_every_dtype(transport: Transport) -> Task[None]:
    """NaNs, infinities, negative zeros and all integers come as they were, scalars too."""
    shapes: list[tuple[int, ...]] = [(), (1,), (257,), (2, 3, 5)]
    pairs = around(transport.world_size)
    yield from exchange(transport, [Letter(*pair, s, d) for pair in pairs for d in DTYPES for s in shapes])


def arrives_whatever_its_size(transport: Transport) -> Task[None]:
    """0 bytes, 1 byte and 20 MB, in turn, so that nothing is taken for part of its neighbour."""
    shapes: list[tuple[int, ...]] = [(0,), (1,), (3, 0, 2), (20 * MIB,), (0,), (1,)]
    pairs = around(transport.world_size)
    letters = [Letter(*pair, s, mx.uint8, salt) for pair in pairs for salt, s in enumerate(shapes)]
    yield from exchange(transport, letters)


def arrives_though_not_contiguous(transport: Transport) -> Task[None]:
    """Transposed, strided and broadcast arrays come as what they show, not as what lies in memory."""
    for source, to in around(transport.world_size):
        for view in (_transposed, _strided, _broadcast):
            array = view(Letter(source, to, (6, 4), mx.int32).values())
            if transport.rank == source:
                yield transport.send(array, to, "a view")
            elif transport.rank == to:
                receive = transport.receive(array.shape, array.dtype, source, "a view")
                yield transport.arrive(receive)
                expect_bits(receive.array, array, f"[rank {to}] {view.__name__}")


def _transposed(array: mx.array) -> mx.array:
    return array.T


def _strided(array: mx.array) -> mx.array:
    return array[1::2, ::3]


def _broadcast(array: mx.array) -> mx.array:
    return mx.broadcast_to(array[:1], (5, array.shape[1]))


def keeps_order_in_each_direction(transport: Transport) -> Task[None]:
    """Letters of one form, sent to and fro, come in the order in which they were sent."""
    pairs = around(transport.world_size)
    yield from exchange(transport, [Letter(*pair, (4,), mx.int32, salt) for salt in range(20) for pair in pairs])


def sends_a_lazy_array(transport: Transport) -> Task[None]:
    """An array that nobody has evaluated yet is evaluated by the send."""
    for source, to in around(transport.world_size):
        values = Letter(source, to, (8, 8), mx.int32).values()
        if transport.rank == source:
            yield transport.send(values * 3 + 1, to, "lazy")
        elif transport.rank == to:
            receive = transport.receive((8, 8), mx.int32, source, "lazy")
            yield transport.arrive(receive)
            expect_bits(receive.array, values * 3 + 1, f"[rank {to}] lazy")


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
    sizes = [4, 64 * MIB, 1, 0, 20 * MIB]
    letters: list[Letter] = []
    for index, size in enumerate(sizes):
        answer = sizes[(index + 1) % len(sizes)]
        letters += [Letter(0, 1, (size,), mx.uint8, index), Letter(1, 0, (answer,), mx.uint8, index)]
    yield from exchange(transport, letters)


def sends_in_the_background(transport: Transport) -> Task[None]:
    """Both ranks send sizes that no buffer takes up, and only then receive."""
    sizes = [4, 64 * MIB, 1, 0, 20 * MIB]
    yield from _send_first(transport, [(size,) for size in sizes])


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
            receives = [transport.receive((16,), mx.int32, source, f"{index} of 8") for index in range(8)][::-1]
            total = mx.stack([receive.array for receive in receives])
            yield from [transport.arrive(receive) for receive in receives]
            expect_bits(total, mx.stack([letter.values() for letter in letters]), f"[rank {to}] eight at once")


def delivers_a_dropped_send(transport: Transport) -> Task[None]:
    """A send that its program does not wait for arrives."""
    for source, to in around(transport.world_size):
        letter = Letter(source, to, (1000,), mx.int32)
        if transport.rank == source:
            transport.send(letter.values(), to, "dropped")
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
    """Sums of integers are exact, and of floats within rounding; ranks may come late."""
    if transport.rank == 0:
        mx.eval(mx.random.normal((200, 200)) @ mx.random.normal((200, 200)))
    for dtype in (mx.int32, mx.float32, mx.bfloat16):
        for shape in [(), (1,), (5,), (3, 1001)]:
            count = int(np.prod(shape, dtype=np.int64))
            ramp = (mx.arange(count).reshape(shape) % 16).astype(dtype)
            total = transport.all_sum(ramp * (transport.rank + 1), "by definition")
            yield total
            factor = transport.world_size * (transport.world_size + 1) // 2
            expect_bits(total.array, ramp * factor, f"[rank {transport.rank}] sum of {dtype} {shape}")


def sums_to_the_same_bits_on_every_rank(transport: Transport) -> Task[None]:
    """However a float sum is rounded, all ranks have the same one."""
    mine = pattern((1000,), mx.int16, salt=transport.rank).astype(mx.float32) / 7
    total = transport.all_sum(mine, "to be compared")
    yield total
    bits = total.array.view(mx.int32)
    halves = mx.stack([bits & 0xFFFF, (bits >> 16) & 0xFFFF])
    compared = transport.all_sum(halves, "comparison")
    yield compared
    expect_bits(
        compared.array, halves * transport.world_size, f"[rank {transport.rank}] the sum's bits, over all ranks"
    )


def keeps_barriers(transport: Transport) -> Task[None]:
    """Nobody leaves a barrier before all have come; several stand one after another."""
    for _ in range(10):
        yield transport.barrier()


def refuses_work_after_close(transport: Transport) -> Task[None]:
    """Once closed, and closed again, a transport says so by an error of its own."""
    yield transport.barrier()
    transport.close()
    transport.close()
    uses: list[Callable[[], object]] = [
        lambda: transport.send(mx.zeros((1,)), (transport.rank + 1) % transport.world_size),
        lambda: transport.receive((1,), mx.float32, (transport.rank + 1) % transport.world_size),
        lambda: transport.all_sum(mx.zeros((1,))),
        transport.barrier,
    ]
    for use in uses:
        try:
            use()
        except TransportClosed:
            continue
        raise ContractBroken(f"[rank {transport.rank}] was used after it was closed, and did not say so")


PROMISES = (
    Promise(arrives_bit_for_bit_in_every_dtype),
    Promise(arrives_whatever_its_size),
    Promise(arrives_though_not_contiguous),
    Promise(keeps_order_in_each_direction),
    Promise(sends_a_lazy_array),
    Promise(takes_the_value_at_the_call),
    Promise(alternates_sizes_in_both_directions),
    Promise(sends_in_the_background, lanes="directional"),
    Promise(sends_any_number_in_the_background, lanes="directional"),
    Promise(receives_into_a_graph),
    Promise(orders_receives_by_their_arrival),
    Promise(delivers_a_dropped_send),
    Promise(sums_beside_messages),
    Promise(sums_by_definition),
    Promise(sums_to_the_same_bits_on_every_rank),
    Promise(keeps_barriers),
    Promise(refuses_work_after_close),
)
"""All promises; the last one leaves the transport closed."""
