"""What the ranks of a contract write to each other: arrays whose bits both ends can make for themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from transports.base import Task, Transport
from transports.buffers import Bytes, array_from, byte_count, bytes_of

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
    if dtype == mx.bool_:
        data %= 2
    elif data.size >= 64 * dtype.size:
        edges = _edges(dtype)
        data[: edges.size] = edges
    return array_from(data, shape, dtype)


def _edges(dtype: mx.Dtype) -> Bytes:
    """Values that random bits miss: -0.0, the smallest subnormals, a NaN, infinities; for integers the extremes."""
    sign, ones = 1 << (8 * dtype.size - 1), (1 << (8 * dtype.size)) - 1
    edges = np.array([sign, 1, sign | 1, ones, ones - sign], dtype=f"u{dtype.size}").view(np.uint8)
    if not mx.issubdtype(dtype, mx.floating):
        return edges
    return np.concatenate([edges, bytes_of(mx.array([float("inf"), -float("inf")]).astype(dtype))])


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


def transposed(array: mx.array) -> mx.array:
    """A view that reads its rows as columns."""
    return array.T


def strided(array: mx.array) -> mx.array:
    """A view that begins late and leaves out columns."""
    return array[1::2, ::3]


def broadcast(array: mx.array) -> mx.array:
    """A view that shows one row five times."""
    return mx.broadcast_to(array[:1], (5, array.shape[1]))


VIEWS = (transposed, strided, broadcast)
