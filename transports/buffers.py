"""The memory behind MLX arrays: reading it as bytes, and filling it in place.

Both go through the buffer protocol, which shares memory with an evaluated array in every dtype, bfloat16 included.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


def bytes_of(array: mx.array) -> Bytes:
    """A copy of the array's values as bytes; a lazy array is evaluated."""
    contiguous = mx.contiguous(array)
    mx.eval(contiguous)
    return _memory(contiguous).copy()


def array_from(data: Bytes, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """A new array of these bytes."""
    array = poisoned(shape, dtype)
    fill(array, data)
    return array


def fill(array: mx.array, data: Bytes) -> None:
    """Put bytes into an evaluated array in place, so that graphs which it was built into see them."""
    _memory(array)[:] = data


def poisoned(shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """An evaluated array whose values cannot be taken for data: NaN, the greatest integer, True."""
    # By way of NumPy: `mx.array` refuses the greatest uint64, and `mx.full(..., dtype=mx.bool_)` makes int32.
    value = mx.array(np.array(_poison(dtype))).astype(dtype)
    array = mx.contiguous(mx.full(tuple(shape), value))
    mx.eval(array)
    return array


def byte_count(shape: Sequence[int], dtype: mx.Dtype) -> int:
    """How many bytes an array of this shape and dtype has."""
    return prod(shape) * dtype.size


def _poison(dtype: mx.Dtype) -> bool | int | float:
    if dtype == mx.bool_:
        return True
    if mx.issubdtype(dtype, mx.integer):
        return int(mx.iinfo(dtype).max)
    return float("nan")


def _memory(array: mx.array) -> Bytes:
    if array.size == 0:
        return np.empty(0, dtype=np.uint8)
    return np.frombuffer(cast(Any, array), dtype=np.uint8)
