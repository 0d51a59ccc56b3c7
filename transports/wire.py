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
        return [
            mx.distributed.recv((size,), dtype, source, group=self._group, stream=self._stream)
            for size in self._sizes(prod(shape), dtype)
        ]

    def all_sum(self, array: mx.array) -> list[mx.array]:
        """One node for each piece, whose values are the sum over all ranks."""
        return [mx.distributed.all_sum(piece, group=self._group, stream=self._stream) for piece in self._pieces(array)]

    def _pieces(self, array: mx.array) -> list[mx.array]:
        sizes = self._sizes(array.size, array.dtype)
        flat = mx.reshape(array, (-1,), stream=self._stream)
        return list(mx.split(flat, list(accumulate(sizes))[:-1], stream=self._stream)) if sizes else []

    def _sizes(self, size: int, dtype: mx.Dtype) -> list[int]:
        at_once = max(1, self._max_piece_bytes // dtype.size)
        return [min(at_once, size - start) for start in range(0, size, at_once)]


def joined(pieces: Sequence[mx.array], shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """The array that went in these pieces; lazy, as they are."""
    if not pieces:
        return mx.zeros(tuple(shape), dtype=dtype)
    return (pieces[0] if len(pieces) == 1 else mx.concatenate(list(pieces))).reshape(tuple(shape))


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
