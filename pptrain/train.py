"""The training loop: what `mlx_lm.lora` does, in its order, over any engine that can step and evaluate.

Batches and call-backs are mlx-lm's own, and NumPy's random generator is drawn from in mlx-lm's order, so that runs can
be compared.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx_lm.tuner.callbacks import TrainingCallback
from mlx_lm.tuner.trainer import iterate_batches

from pptrain.config import TrainConfig
from pptrain.microbatch import Microbatch, cut
from pptrain.reference import StepResult


class Engine(Protocol):
    """What a run needs from whoever computes: a pipeline, or one device."""

    model: nn.Module

    def step_microbatches(
        self, optimizer: optim.Optimizer, microbatches: Sequence[Microbatch], *, max_grad_norm: float | None = None
    ) -> StepResult:
        """One update."""
        ...

    def loss_sum(self, microbatches: Sequence[Microbatch]) -> float:
        """Token losses, summed, in evaluation mode."""
        ...

    def everybody(self, value: float) -> list[float]:
        """A number of each rank."""
        ...


@dataclass(slots=True)
class _Since:
    """What has been trained since the last report."""

    losses: list[float] = field(default_factory=list[float])
    tokens: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Run:
    """The loop of a training run; the same on every rank.

    Args:
        engine: Who computes.
        config: What was asked for.
        optimizer: Of this rank's parameters.
        train_set: Examples, as mlx-lm's `CacheDataset`.
        valid_set: Examples, or none for no validation.
        callbacks: Told of each report; only the first rank has any.
        save: Called with the iteration when a numbered save is due.
        advanced: Called with the iteration when it has been trained.
    """

    engine: Engine
    config: TrainConfig
    optimizer: optim.Optimizer
    train_set: Any
    valid_set: Any = None
    callbacks: Sequence[TrainingCallback] = ()
    save: Callable[[int], None] = lambda iteration: None
    advanced: Callable[[int], None] = lambda iteration: None
    trained_tokens: int = 0
    grad_norm: float = 0.0
    losses: list[float] = field(default_factory=list[float])
    """The loss of every iteration."""
    _since: _Since = field(default_factory=_Since)

    def run(self) -> None:
        """Train for `iters` batches, one update every `grad_accumulation_steps` of them."""
        config = self.config
        self.engine.model.train()
        window, started = list[list[Microbatch]](), time.perf_counter()
        for iteration, batch in zip(
            range(1, config.iters + 1), batches(self.train_set, config, loop=True), strict=False
        ):
            if self.valid_set and self._is_validation(iteration):
                # Nothing is updated within a window, so this is the loss at this iteration, as in mlx-lm.
                self._validate(iteration)
                started = time.perf_counter()
            window.append(batch)
            if iteration % config.grad_accumulation_steps == 0 or iteration == config.iters:
                losses = self._train(window, iteration % config.grad_accumulation_steps == 0)
                self._since.seconds += time.perf_counter() - started
                first = iteration - len(window) + 1
                for at, (microbatches, loss) in enumerate(zip(window, losses, strict=True), first):
                    self._trained(at, microbatches, loss)
                window, started = [], time.perf_counter()
            if iteration % config.save_every == 0:
                self.save(iteration)
                started = time.perf_counter()

    def _is_validation(self, iteration: int) -> bool:
        return iteration in (1, self.config.iters) or iteration % self.config.steps_per_eval == 0

    def _validate(self, iteration: int) -> None:
        started = time.perf_counter()
        loss = evaluate(self.engine, self.valid_set, self.config, self.config.val_batches)
        info = {"iteration": iteration - 1, "val_loss": loss, "val_time": time.perf_counter() - started}
        for callback in self.callbacks:
            callback.on_val_loss_report(dict(info))

    def _train(self, window: Sequence[Sequence[Microbatch]], is_update: bool) -> list[float]:
        """One update over all batches of the window; returns the loss of each batch."""
        if not is_update:  # the run ends within a window: as in mlx-lm its last batches are seen, and update nothing
            return [_mean(self.engine.loss_sum(batch), batch) for batch in window]
        microbatches = [m for batch in window for m in batch]
        result = self.engine.step_microbatches(self.optimizer, microbatches, max_grad_norm=self.config.max_grad_norm)
        self.grad_norm = result.grad_norm
        if mx.get_cache_memory() > self.config.clear_cache_threshold:
            mx.clear_cache()
        if len(window) == 1:
            return [result.loss]
        shares = iter(result.losses)
        sums = [sum(next(shares) for _ in batch) * result.num_tokens for batch in window]
        return [_mean(total, batch) for total, batch in zip(sums, window, strict=True)]

    def _trained(self, iteration: int, microbatches: Sequence[Microbatch], loss: float) -> None:
        self.losses.append(loss)
        self._since.losses.append(loss)
        self._since.tokens += _tokens(microbatches)
        self.advanced(iteration)
        if iteration % self.config.steps_per_report == 0 or iteration == self.config.iters:
            self._report(iteration)

    def _report(self, iteration: int) -> None:
        since, self._since = self._since, _Since()
        self.trained_tokens += since.tokens
        seconds = max(since.seconds, 1e-9)
        peaks = self.engine.everybody(mx.get_peak_memory() / 1e9)
        info = {
            "iteration": iteration,
            "train_loss": sum(since.losses) / len(since.losses),
            "learning_rate": float(np.asarray(self.optimizer.learning_rate)),
            "iterations_per_second": len(since.losses) / seconds,
            "tokens_per_second": since.tokens / seconds,
            "trained_tokens": self.trained_tokens,
            "peak_memory": max(peaks),
            "grad_norm": self.grad_norm,
            "peak_memory_by_rank": peaks,
        }
        for callback in self.callbacks:
            callback.on_train_loss_report(dict(info))


def batches(data: Any, config: TrainConfig, loop: bool = False) -> Iterator[list[Microbatch]]:
    """mlx-lm's batches, each cut into microbatches."""
    found = iterate_batches(data, config.batch_size, config.max_seq_length, loop=loop)
    for batch, lengths in found:
        yield cut(batch, lengths, config.microbatches or config.batch_size)


def evaluate(engine: Engine, data: Any, config: TrainConfig, num_batches: int) -> float:
    """Mean loss of all tokens of the first batches of a data set, drawn as mlx-lm draws them; -1 means all."""
    total, tokens = 0.0, 0
    numbers = range(num_batches) if num_batches != -1 else count()
    for _, microbatches in zip(numbers, batches(data, config), strict=False):
        total += engine.loss_sum(microbatches)
        tokens += _tokens(microbatches)
    return total / tokens if tokens else math.nan


def _tokens(microbatches: Sequence[Microbatch]) -> int:
    return sum(m.num_tokens for m in microbatches)


def _mean(total: float, microbatches: Sequence[Microbatch]) -> float:
    tokens = _tokens(microbatches)
    return total / tokens if tokens else 0.0
