"""Messages as nodes of `mx.distributed`: lazy arrays that communicate when they are evaluated.

There a message has no tag, shape or dtype: both ends derive from shape and dtype in how many pieces it goes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from math import prod

import mlx.core as mx

MAX_PIECE_BYTES = 1 << 30
"""Larger messages go in several pieces: transfers of 2 GiB failed in MLX before 0.32."""

MAX_FLAT = (1 << 31) - 1
"""How many elements MLX can have along one axis: more than that cannot be reshaped to a flat array."""


class Wire:
    """Makes the nodes of one stream. To be used in the thread that made it, since MLX's streams belong to threads.

    Args:
        group: Who communicates.
        max_piece_bytes: What goes over the wire at once.
    """

    def __init__(self, group: mx.distributed.Group, max_piece_bytes: int) -> None:
        self._group = group
        self._stream = mx.new_stream(mx.cpu)
        self._max_piece_bytes = max_piece_bytes

    def send(self, array: mx.array, to: int) -> list[mx.array]:
        """One node for each piece; none for an array of 0 bytes, which does not go over the wire."""
        return [mx.distributed.send(piece, to, group=self._group, stream=self._stream) for piece in self._pieces(array)]

    def receive(self, shape: Sequence[int], dtype: mx.Dtype, source: int) -> list[mx.array]:
        """One node for each piece, whose values are the piece's."""
        sizes = piece_sizes(shape, self._max_piece_bytes // dtype.size)
        return [mx.distributed.recv((n,), dtype, source, group=self._group, stream=self._stream) for n in sizes]

    def all_sum(self, array: mx.array) -> list[mx.array]:
        """One node for each piece, whose values are the sum over all ranks."""
        return [mx.distributed.all_sum(piece, group=self._group, stream=self._stream) for piece in self._pieces(array)]

    def _pieces(self, array: mx.array) -> list[mx.array]:
        return pieces(array, self._max_piece_bytes // array.dtype.size, self._stream)


def piece_sizes(shape: Sequence[int], most: int, max_flat: int = MAX_FLAT) -> list[int]:
    """How many elements each piece of an array has, at most `most` or one; both ends of a link derive it.

    Args:
        shape: Of the whole array.
        most: Elements in a piece.
        max_flat: An array of more elements is halved before it is laid out flat.
    """
    if prod(shape) > max_flat:
        return [size for half in _halves(shape)[1] for size in piece_sizes(half, most, max_flat)]
    size, at_once = prod(shape), max(1, most)
    return [min(at_once, size - start) for start in range(0, size, at_once)]


def pieces(array: mx.array, most: int, stream: mx.Stream | None = None, max_flat: int = MAX_FLAT) -> list[mx.array]:
    """The flat pieces of an array, of those sizes; lazy."""
    if array.size > max_flat:
        axis, (first, _) = _halves(array.shape)
        halves = mx.split(array, [first[axis]], axis, stream=stream)
        return [piece for half in halves for piece in pieces(half, most, stream, max_flat)]
    sizes = piece_sizes(array.shape, most, max_flat)
    flat = mx.reshape(array, (-1,), stream=stream)
    return list(mx.split(flat, list(accumulate(sizes))[:-1], stream=stream)) if sizes else []


def _halves(shape: Sequence[int]) -> tuple[int, tuple[list[int], list[int]]]:
    """The longest axis, and the shapes of the two halves along it."""
    axis = max(range(len(shape)), key=lambda each: shape[each])
    middle = shape[axis] // 2
    before, after = list(shape[:axis]), list(shape[axis + 1 :])
    return axis, ([*before, middle, *after], [*before, shape[axis] - middle, *after])


def joined(parts: Sequence[mx.array], shape: Sequence[int], dtype: mx.Dtype, max_flat: int = MAX_FLAT) -> mx.array:
    """The array that went in these pieces; lazy, as they are."""
    if not parts:
        return mx.zeros(tuple(shape), dtype=dtype)
    if prod(shape) > max_flat:
        axis, (first, second) = _halves(shape)
        count = list(accumulate(part.size for part in parts)).index(prod(first)) + 1
        halves = [(parts[:count], first), (parts[count:], second)]
        return mx.concatenate([joined(some, half, dtype, max_flat) for some, half in halves], axis)
    return (parts[0] if len(parts) == 1 else mx.concatenate(list(parts))).reshape(tuple(shape))


def evaluate(nodes: Sequence[mx.array]) -> None:
    """Communicate, one node after another: several in one `mx.eval` run in reverse order."""
    for node in nodes:
        mx.eval(node)


class Sender:
    """Sends to one peer in the background, one message after another.

    A thread, and not `mx.async_eval`, because MLX lets only some 30 evaluations be under way: with more sends posted,
    every other evaluation waits until one has left, the receive that the peer is waiting for included.
    """

    def __init__(self, group: mx.distributed.Group, to: int, max_piece_bytes: int) -> None:
        self.error: RuntimeError | None = None
        self._arguments = group, max_piece_bytes
        self._to = to
        self._unsent: deque[mx.array] = deque()
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"sends to rank {to}", daemon=True)
        self._thread.start()

    def post(self, array: mx.array) -> None:
        """Send an evaluated array after all those before it."""
        with self._changed:
            self._unsent.append(array)
            self._changed.notify_all()

    def flush(self) -> None:
        """Return when everything has left; raises the first error of the wire."""
        with self._changed:
            self._changed.wait_for(lambda: self.error is not None or not self._unsent)
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Let the thread end, when what it is sending has left."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        wire = Wire(*self._arguments)
        while self._has_more():
            try:
                evaluate(wire.send(self._unsent[0], self._to))
            except RuntimeError as error:
                self._end_message(error)
                return
            self._end_message(None)

    def _has_more(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or bool(self._unsent))
            return not self._is_closed

    def _end_message(self, error: RuntimeError | None) -> None:
        with self._changed:
            self.error = error
            self._unsent.popleft()
            self._changed.notify_all()
