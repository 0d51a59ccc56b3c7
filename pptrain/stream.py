"""The batches of a training run: mlx-lm's own, endless, and able to go on where another process stood."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.tuner.trainer import iterate_batches

from pptrain.config import TrainConfig
from pptrain.microbatch import Microbatch, cut
from pptrain.progress import NumpyState, Progress, as_numpy, numpy_state, set_numpy_state

_Place = tuple[NumpyState, int]
"""An epoch, by the state that its order was drawn from, and a batch in it."""


class Stream:
    """Batches that know where they stand.

    mlx-lm draws the order of an epoch when the first batch of it is asked for, from NumPy's global generator, which
    validation draws from in between. So an epoch's order is brought back by drawing it again from the state that the
    generator had then, and the generator's state is a second thing to keep.

    Args:
        data: Rows, as mlx-lm's `CacheDataset`.
        config: Says how they become batches.
        start: Where to go on; NumPy's generator is left in the state that it names.
    """

    def __init__(self, data: Any, config: TrainConfig, start: Progress | None = None) -> None:
        self._data, self._config = data, config
        self._length = max(len(data) // config.batch_size, 1)
        self._batches: Iterator[tuple[mx.array, mx.array]] = iterate_batches(
            data, config.batch_size, config.max_seq_length, loop=True
        )
        self._seen = deque[_Place](maxlen=config.grad_accumulation_steps)
        self.epoch, self.offset, self.epoch_state = 0, 0, numpy_state()
        if start is not None:
            self._go_to(start)

    def _go_to(self, start: Progress) -> None:
        self.epoch, self.offset, self.epoch_state = start.epoch, start.offset, start.epoch_state
        if 0 < self.offset < self._length:
            set_numpy_state(self.epoch_state)
            for _ in range(self.offset):
                next(self._batches)
        set_numpy_state(start.numpy_state)

    def next(self) -> list[Microbatch]:
        """The next batch, cut into microbatches."""
        if self.offset == self._length:
            self.epoch, self.offset = self.epoch + 1, 0
        if self.offset == 0:
            self.epoch_state = numpy_state()
        self._seen.append((self.epoch_state, self.offset))
        batch, lengths = next(self._batches)
        self.offset += 1
        return cut(batch, lengths, self._config.microbatches or self._config.batch_size)

    def rows_of_last(self, num_batches: int) -> list[str]:
        """File and line of the rows of the last batches."""
        size = self._config.batch_size
        in_order = sorted(range(len(self._data)), key=self._data.itemlen)  # as mlx-lm cuts a set into batches
        found = list[str]()
        for epoch_state, offset in list(self._seen)[-num_batches:]:
            first = size * self._order(epoch_state)[offset]
            found += [self._data.rows[row].where for row in in_order[first : first + size]]
        return found

    def _order(self, epoch_state: NumpyState) -> list[int]:
        generator = np.random.RandomState()
        generator.set_state(as_numpy(epoch_state))
        return generator.permutation(self._length).tolist()
