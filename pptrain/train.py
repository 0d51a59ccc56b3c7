"""The training loop: what `mlx_lm.lora` does, in its order, over any engine that can step and evaluate.

Batches and call-backs are mlx-lm's own, and NumPy's random generator is drawn from in mlx-lm's order, so that runs can
be compared.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, Protocol

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx_lm.tuner.callbacks import TrainingCallback
from mlx_lm.tuner.trainer import iterate_batches

from pptrain.config import TrainConfig
from pptrain.errors import NonFiniteError
from pptrain.microbatch import Microbatch, cut
from pptrain.progress import Best, NumpyState, Progress, Since, mlx_state, numpy_state
from pptrain.reference import StepResult
from pptrain.stream import Stream

logger = logging.getLogger(__name__)

Ended = Literal["done", "asked", "early"]
"""Why a run ended: all iterations are trained, somebody asked for it, or validation did not become better."""


class Engine(Protocol):
    """What a run needs from whoever computes: a pipeline, or one device."""

    model: nn.Module
    num_steps: int
    """Updates so far; part of what dropout masks depend on."""
    asks_to_stop: bool
    """Whether this process asks for the run to stop; the next update's result tells every rank."""

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
        save_best: Called when a validation was the best so far.
        advanced: Called with the iteration when it has been trained.
        checkpoint: Called with where the run stands when that is to be kept; returns what to say of it.
        start: Where to go on; None for the beginning.
    """

    engine: Engine
    config: TrainConfig
    optimizer: optim.Optimizer
    train_set: Any
    valid_set: Any = None
    callbacks: Sequence[TrainingCallback] = ()
    save: Callable[[int], None] = lambda iteration: None
    save_best: Callable[[], None] = lambda: None
    advanced: Callable[[int], None] = lambda iteration: None
    checkpoint: Callable[[Progress], str] = lambda progress: ""
    start: Progress | None = None
    trained_tokens: int = 0
    grad_norm: float = 0.0
    losses: list[float] = field(default_factory=list[float])
    """The loss of every iteration of this process; not a number where the update was skipped."""
    ended: Ended = "done"
    """Why the run ended."""
    at: Progress = field(init=False)
    """Where it stood after its last update: with the parameters, all that its future depends on."""
    _stream: Stream = field(init=False)
    _since: Since = field(default_factory=Since)
    _best: Best = field(default_factory=Best)
    _window: list[list[Microbatch]] = field(default_factory=list[list[Microbatch]])
    _started: float = 0.0
    _kept_at: int = 0
    _before_last: tuple[NumpyState, Best] | None = None

    def run(self) -> None:
        """Train until `iters` batches have been seen, one update every `grad_accumulation_steps` of them."""
        self.engine.model.train()
        self._begin()
        for iteration in range(self.at.iteration + 1, self.config.iters + 1):
            if self._has_no_hope():
                self.ended = "early"
                self._keep()
            if self.ended != "done":
                return
            self._iterate(iteration)

    def _begin(self) -> None:
        start = self.start
        self._stream = Stream(self.train_set, self.config, start)
        if start is not None:
            self.engine.num_steps, self._kept_at = start.num_steps, start.iteration
            self.trained_tokens, self.grad_norm = start.trained_tokens, start.grad_norm
            self._since, self._best = start.since, start.best
            mx.random.seed(start.mlx_state)
        self.at = self._progress(start.iteration if start else 0)
        self._started = time.perf_counter()

    def _progress(self, iteration: int) -> Progress:
        """Where the run stands; a validation that was due only because the run ends leaves no trace in it."""
        generator, best = self._before_last or (numpy_state(), self._best)
        stream = self._stream
        return Progress(
            iteration=iteration,
            num_steps=self.engine.num_steps,
            epoch=stream.epoch,
            offset=stream.offset,
            epoch_state=stream.epoch_state,
            numpy_state=generator,
            mlx_state=mlx_state(),
            trained_tokens=self.trained_tokens,
            grad_norm=self.grad_norm,
            since=self._since,
            best=best,
        )

    def _iterate(self, iteration: int) -> None:
        """One batch; the update, where the window is full or the run ends; and what is due then."""
        batch = self._stream.next()
        if self.valid_set and self._is_validation(iteration):
            # Nothing is updated within a window, so this is the loss at this iteration, as in mlx-lm.
            self._validate(iteration)
            self._started = time.perf_counter()
        self._window.append(batch)
        is_update, is_asked = iteration % self.config.grad_accumulation_steps == 0, False
        if is_update or iteration == self.config.iters:
            is_asked = self._finish_window(iteration, is_update)
        if iteration % self.config.save_every == 0:
            self.save(iteration)
            self._started = time.perf_counter()
        if is_update:  # only between two updates can a run be taken up again
            self.at = self._progress(iteration)
            self._keep_if_due(is_asked)

    def _keep_if_due(self, is_asked: bool) -> None:
        iteration, every = self.at.iteration, self.config.checkpoint_every
        is_last = iteration == self.config.iters
        if is_asked and not is_last:
            self.ended = "asked"
        if is_asked or is_last or iteration // every > self._kept_at // every:
            self._keep()

    def _keep(self) -> str:
        """Write a checkpoint, unless this one has been; returns what to say of it."""
        self._kept_at = self.at.iteration
        said = self.checkpoint(self.at)
        self._started = time.perf_counter()
        return said

    def _is_validation(self, iteration: int) -> bool:
        return self._is_regular_validation(iteration) or iteration == self.config.iters

    def _is_regular_validation(self, iteration: int) -> bool:
        return iteration == 1 or iteration % self.config.steps_per_eval == 0

    def _validate(self, iteration: int) -> None:
        if not self._is_regular_validation(iteration):
            self._before_last = numpy_state(), self._best
        started = time.perf_counter()
        loss = evaluate(self.engine, self.valid_set, self.config, self.config.val_batches)
        info = {"iteration": iteration - 1, "val_loss": loss, "val_time": time.perf_counter() - started}
        for callback in self.callbacks:
            callback.on_val_loss_report(dict(info))
        self._best = self._best.after(loss)
        if self._best.num_worse == 0:
            self.save_best()

    def _has_no_hope(self) -> bool:
        """Whether validation has not become better for as long as `early_stop` says."""
        limit = self.config.early_stop
        return limit is not None and self._best.num_worse >= limit and not self._window

    def _finish_window(self, iteration: int, is_update: bool) -> bool:
        """Train all batches of the window; returns whether any rank asks for the run to stop."""
        window, self._window = self._window, []
        losses, is_asked = self._train(window, is_update, iteration)
        self._since = self._since.later(time.perf_counter() - self._started)
        first = iteration - len(window) + 1
        for at, (microbatches, loss) in enumerate(zip(window, losses, strict=True), first):
            self._trained(at, microbatches, loss)
        self._started = time.perf_counter()
        return is_asked

    def _train(
        self, window: Sequence[Sequence[Microbatch]], is_update: bool, iteration: int
    ) -> tuple[list[float], bool]:
        """One update over all batches of the window; returns the loss of each, and whether any rank asks to stop."""
        if not is_update:  # the run ends within a window: as in mlx-lm its last batches are seen, and update nothing
            return [_mean(self.engine.loss_sum(batch), batch) for batch in window], False
        microbatches, limit = [m for batch in window for m in batch], self.config.max_grad_norm
        try:
            result = self.engine.step_microbatches(self.optimizer, microbatches, max_grad_norm=limit)
        except NonFiniteError as error:
            self._not_finite(error, iteration, len(window))
            losses, num_asking = [math.nan] * len(window), error.num_asking
        else:
            self.grad_norm = result.grad_norm
            losses, num_asking = _losses_of(window, result), result.num_asking
        _clear_cache(self.config)
        return losses, num_asking > 0

    def _not_finite(self, error: NonFiniteError, iteration: int, num_batches: int) -> None:
        """Every rank sees the same numbers, and so comes here alike; nothing has been updated."""
        rows = ", ".join(self._stream.rows_of_last(num_batches))
        what = f"{error}\n  It was iteration {iteration}, of the rows {rows}."
        if self.config.on_nonfinite == "stop":
            raise NonFiniteError(f"{what} --on-nonfinite skip leaves such updates out.{self._keep()}") from error
        logger.warning("%s Its update was skipped.", what)

    def _trained(self, iteration: int, microbatches: Sequence[Microbatch], loss: float) -> None:
        self.losses.append(loss)
        if math.isfinite(loss):
            self._since = self._since.trained(loss, _tokens(microbatches))
        self.advanced(iteration)
        is_regular = iteration % self.config.steps_per_report == 0
        if is_regular or iteration == self.config.iters:
            self._report(iteration)
        if is_regular:  # a report that is due only because the run ends leaves no trace, should it go on some day
            self.trained_tokens, self._since = self.trained_tokens + self._since.tokens, Since()

    def _report(self, iteration: int) -> None:
        since = self._since
        seconds = max(since.seconds, 1e-9)
        peaks = self.engine.everybody(mx.get_peak_memory() / 1e9)
        info = {
            "iteration": iteration,
            "train_loss": sum(since.losses) / len(since.losses) if since.losses else math.nan,
            "learning_rate": float(np.asarray(self.optimizer.learning_rate)),
            "iterations_per_second": len(since.losses) / seconds,
            "tokens_per_second": since.tokens / seconds,
            "trained_tokens": self.trained_tokens + since.tokens,
            "peak_memory": max(peaks),
            "grad_norm": self.grad_norm,
            "peak_memory_by_rank": peaks,
        }
        for callback in self.callbacks:
            callback.on_train_loss_report(dict(info))


def batches(data: Any, config: TrainConfig) -> Iterator[list[Microbatch]]:
    """mlx-lm's batches of one epoch, each cut into microbatches."""
    found = iterate_batches(data, config.batch_size, config.max_seq_length)
    for batch, lengths in found:
        yield cut(batch, lengths, config.microbatches or config.batch_size)


def evaluate(engine: Engine, data: Any, config: TrainConfig, num_batches: int) -> float:
    """Mean loss of all tokens of the first batches of a data set, drawn as mlx-lm draws them; -1 means all."""
    total, tokens = 0.0, 0
    numbers = range(num_batches) if num_batches != -1 else count()
    for _, microbatches in zip(numbers, batches(data, config), strict=False):
        total += engine.loss_sum(microbatches)
        tokens += _tokens(microbatches)
        _clear_cache(config)
    return total / tokens if tokens else math.nan


def _clear_cache(config: TrainConfig) -> None:
    """After each update and each batch of an evaluation, as mlx-lm does.

    Never after an error of the transport: here MLX waits for all that its threads still do, and lets no other thread of
    Python run meanwhile. A message to a rank that is lost never leaves, and the process would never end.
    """
    if mx.get_cache_memory() > config.clear_cache_threshold:
        mx.clear_cache()


def _losses_of(window: Sequence[Sequence[Microbatch]], result: StepResult) -> list[float]:
    """The loss of each batch of an update."""
    if len(window) == 1:
        return [result.loss]
    shares = iter(result.losses)
    sums = [sum(next(shares) for _ in batch) * result.num_tokens for batch in window]
    return [_mean(total, batch) for total, batch in zip(sums, window, strict=True)]


def _tokens(microbatches: Sequence[Microbatch]) -> int:
    return sum(m.num_tokens for m in microbatches)


def _mean(total: float, microbatches: Sequence[Microbatch]) -> float:
    tokens = _tokens(microbatches)
    return total / tokens if tokens else 0.0
