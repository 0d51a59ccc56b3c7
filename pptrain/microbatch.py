"""What one action sees: a part of the batch, how many of its tokens count, and which random masks belong to it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from pptrain.errors import BatchError

TokenLoss = Callable[[mx.array, mx.array], mx.array]
"""`loss(logits [b, seq, vocab], targets [b, seq]) -> [b, seq]`, one loss for each token."""


def cross_entropy(logits: mx.array, targets: mx.array) -> mx.array:
    """The loss of each token, as mlx-lm's trainer computes it."""
    return nn.losses.cross_entropy(logits, targets)


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Some rows of a batch, in the batch's padded width."""

    tokens: mx.array
    """int32 `[microbatch_size, seq + 1]`: inputs and, one to the right, targets."""
    lengths: mx.array
    """int32 `[microbatch_size, 2]`: first and last target position that counts, from 1, both included."""

    @property
    def inputs(self) -> mx.array:
        """`[microbatch_size, seq]`."""
        return self.tokens[:, :-1]

    @property
    def num_tokens(self) -> int:
        """How many targets count."""
        seq = self.tokens.shape[1] - 1
        bounds = np.asarray(self.lengths)
        first, last = np.maximum(bounds[:, 0], 1), np.minimum(bounds[:, 1], seq)
        return int(np.maximum(last - first + 1, 0).sum())


def cut(batch: mx.array, lengths: mx.array, num_microbatches: int) -> list[Microbatch]:
    """Divide the rows of a batch into microbatches, the larger ones first: 7 rows in 3 are cut 3, 2, 2.

    Raises:
        BatchError: If there are fewer rows than microbatches, or if batch and lengths do not fit.
    """
    rows = batch.shape[0]
    if batch.ndim != 2 or batch.shape[1] < 2 or tuple(lengths.shape) != (rows, 2):
        raise BatchError(
            f"[batch] batch has shape {tuple(batch.shape)} and lengths {tuple(lengths.shape)}. Expected "
            "[batch, seq + 1] with seq of at least 1, and [batch, 2]. Make both as mlx-lm's iterate_batches does."
        )
    if not 1 <= num_microbatches <= rows:
        raise BatchError(
            f"[microbatches] A batch of {rows} examples cannot be cut into {num_microbatches} microbatches: every one "
            f"needs at least one example. Use between 1 and {rows} microbatches, or a larger batch size."
        )
    share, extra = divmod(rows, num_microbatches)
    ends = [share * (j + 1) + min(j + 1, extra) for j in range(num_microbatches)]
    return [Microbatch(batch[a:b], lengths[a:b]) for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def count_tokens(microbatches: Sequence[Microbatch]) -> int:
    """Targets that count in all microbatches together; known before the first forward.

    Raises:
        BatchError: If none does: there is nothing to learn, and a mean over no token is not a number.
    """
    total = sum(microbatch.num_tokens for microbatch in microbatches)
    if not total:
        raise BatchError(
            f"[batch] No target of the whole batch counts: all of its {len(microbatches)} microbatches are fully "
            "masked. Expected at least one unmasked token. Leave this batch out, or check the prompt mask and the "
            "sequence limit."
        )
    return total


def loss_share(
    logits: mx.array, microbatch: Microbatch, num_tokens: mx.array, loss: TokenLoss = cross_entropy
) -> mx.array:
    """This microbatch's part of the batch's loss: its token losses summed in float32, over the whole batch's tokens.

    Args:
        logits: `[microbatch_size, seq, vocab]`.
        microbatch: Gives targets and mask.
        num_tokens: float32 scalar, the unmasked tokens of *all* microbatches: never a mean of means.
        loss: Token losses of logits and targets.
    """
    targets = microbatch.tokens[:, 1:]
    steps = mx.arange(1, targets.shape[1] + 1)
    mask = mx.logical_and(steps >= microbatch.lengths[:, 0:1], steps <= microbatch.lengths[:, 1:])
    return (loss(logits, targets) * mask).astype(mx.float32).sum() / num_tokens


def mask_seed(seed: int, step: int, microbatch: int, site: int) -> int:
    """The state of MLX's random generator in one part of one forward; no cut, schedule or recompute mode changes it.

    A part is what comes before the layers (site 0), a layer (its number, from 1), or what follows a layer (minus that).
    """
    name = f"{seed},{step},{microbatch},{site}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")


@contextmanager
def kept_random_state() -> Generator[None]:
    """Leave MLX's global random generator as it was found."""
    state: Any = mx.random.state
    high, low = (int(word) for word in np.asarray(state[0]))
    try:
        yield
    finally:
        mx.random.seed((high << 32) | low)
