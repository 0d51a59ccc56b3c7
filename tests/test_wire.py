"""Messages in pieces: both ends derive the same ones, also of arrays that MLX cannot lay out flat."""

from __future__ import annotations

from math import prod

import mlx.core as mx
import pytest

from transports.wire import MAX_FLAT, MAX_PIECE_BYTES, joined, piece_sizes, pieces

SHAPES = [(), (1,), (0,), (7,), (3, 5), (2, 3, 4), (1, 11, 1), (4, 0, 2), (5, 2, 2, 3)]


@pytest.mark.parametrize("max_flat", [1, 4, 10, MAX_FLAT])
@pytest.mark.parametrize("most", [0, 1, 3, 1000])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_pieces_of_an_array_make_it_again(shape: tuple[int, ...], most: int, max_flat: int) -> None:
    array = mx.arange(prod(shape), dtype=mx.int32).reshape(shape)
    parts = pieces(array, most, max_flat=max_flat)
    assert [part.shape for part in parts] == [(size,) for size in piece_sizes(shape, most, max_flat)]
    assert all(part.size <= max(1, min(most, max_flat)) for part in parts)
    again = joined(parts, shape, mx.int32, max_flat)
    assert again.shape == shape
    assert mx.array_equal(again, array)


@pytest.mark.parametrize("shape", [(2, 1 << 30), (3, 1 << 29, 2), (65536, 65536), (2, (1 << 30) + 12)])
@pytest.mark.parametrize("dtype", [mx.uint8, mx.float32])
def test_more_elements_than_one_axis_can_have_are_halved_first(shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    """Nothing of this is evaluated, so it takes no memory."""
    array = mx.broadcast_to(mx.zeros((1,), dtype), shape)
    most = MAX_PIECE_BYTES // dtype.size
    parts = pieces(array, most)
    assert [part.size for part in parts] == piece_sizes(shape, most)
    assert sum(part.size for part in parts) == prod(shape) > MAX_FLAT
    assert joined(parts, shape, dtype).shape == shape


def test_pieces_are_as_large_as_they_may_be() -> None:
    assert piece_sizes((2, 1 << 30), 1 << 30) == [1 << 30] * 2
    assert piece_sizes((10,), 4) == [4, 4, 2]
    assert piece_sizes((10,), 4, max_flat=8) == [4, 1, 4, 1]
