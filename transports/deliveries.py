"""What a transport promises of its messages: that they come as they were sent, in order, and hold nobody up.

One check for each promise; `contract` lists them.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from transports.base import Task, Transport
from transports.buffers import bytes_of, fill
from transports.letters import DTYPES, MIB, VIEWS, Letter, around, exchange, expect_bits

SIZES = (4, 64 * MIB, 1, 0, 20 * MIB)


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
    """A message of 2 GiB and 24 bytes, and of more elements than 31 bits count, comes whole, in however many pieces."""
    yield from exchange(transport, [Letter(0, 1, (2, (1 << 30) + 12), mx.uint8)])


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
