"""The law: one device, MLX's own autograd, the same microbatches in the same order, float32 accumulation.

Everything that a pipeline computes is compared with this, bit for bit. It is meant to be believed at sight.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_map

from pptrain.microbatch import (
    Microbatch,
    TokenLoss,
    count_tokens,
    cross_entropy,
    cut,
    kept_random_state,
    loss_share,
    mask_seed,
)
from pptrain.model import find_layers, intercepted


@dataclass(frozen=True, slots=True)
class Result:
    """Loss and gradients of one step."""

    loss: mx.array
    """float32 scalar: token losses of all microbatches over their unmasked tokens."""
    num_tokens: int
    """Unmasked tokens of all microbatches."""
    grads: Any
    """float32, a tree with the whole model's names: trainable leaves only."""
    losses: tuple[mx.array, ...] = ()
    """Each microbatch's share of the loss; they add up to it."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a training step says, the same on every rank."""

    loss: float
    """Token losses over unmasked tokens."""
    losses: tuple[float, ...]
    """Each microbatch's share of the loss; they add up to it."""
    num_tokens: int
    grad_norm: float
    """Global, before clipping."""
    num_asking: int = 0
    """How many ranks ask for the run to stop after this step."""


def value_and_grad(
    model: nn.Module,
    batch: mx.array,
    lengths: mx.array,
    num_microbatches: int,
    *,
    loss: TokenLoss = cross_entropy,
    seed: int = 0,
    step: int = 0,
) -> Result:
    """Loss and gradients of a batch on one device.

    Args:
        model: Its trainable parameters are differentiated.
        batch: int32 `[batch, seq + 1]`, as mlx-lm's `iterate_batches` makes it.
        lengths: int32 `[batch, 2]`, first and last target position that counts, from 1, both included.
        num_microbatches: Into how many parts the rows are cut.
        loss: Token losses of logits and targets.
        seed: Of the dropout masks, with the step.
        step: Number of the step.

    Raises:
        BatchError: If the batch cannot be cut so, or is fully masked.
    """
    return of_microbatches(model, cut(batch, lengths, num_microbatches), loss=loss, seed=seed, step=step)


def of_microbatches(
    model: nn.Module,
    microbatches: Sequence[Microbatch],
    *,
    loss: TokenLoss = cross_entropy,
    seed: int = 0,
    step: int = 0,
) -> Result:
    """`value_and_grad` of microbatches that are cut already, of any widths."""
    count = count_tokens(microbatches)
    num_tokens = mx.array(count, mx.float32)
    losses, sums = list[mx.array](), None
    for index, microbatch in enumerate(microbatches):
        with masks_of(model, seed, step, index):
            share = lambda m=microbatch: loss_share(model(m.inputs), m, num_tokens, loss)  # noqa: E731
            value, grads = nn.value_and_grad(model, share)()
        grads = tree_map(lambda g: g.astype(mx.float32), grads)
        sums = grads if sums is None else tree_map(lambda a, b: a + b, sums, grads)
        losses.append(value)
        mx.eval(value, sums)
    total = losses[0]
    for value in losses[1:]:
        total = total + value
    return Result(total, count, sums, tuple(losses))


def step(
    model: nn.Module,
    optimizer: optim.Optimizer,
    microbatches: Sequence[Microbatch],
    *,
    max_grad_norm: float | None = None,
    loss: TokenLoss = cross_entropy,
    seed: int = 0,
    step: int = 0,
) -> tuple[Result, mx.array]:
    """One update on one device; returns the result, its gradients unclipped, and their global norm."""
    result = of_microbatches(model, microbatches, loss=loss, seed=seed, step=step)
    return result, update(model, optimizer, result.grads, max_grad_norm)


def update(model: nn.Module, optimizer: optim.Optimizer, grads: Any, max_grad_norm: float | None = None) -> mx.array:
    """Clip float32 gradients, cast them to the parameters' dtypes and apply them; returns the norm before clipping."""
    clipped, norm = optim.clip_grad_norm(grads, max_grad_norm or 1.0)
    grads = clipped if max_grad_norm else grads
    optimizer.update(model, tree_map(lambda g, p: g.astype(p.dtype), grads, model.trainable_parameters()))
    mx.eval(model.trainable_parameters(), optimizer.state, norm)
    return norm


def loss_sum(model: nn.Module, microbatches: Sequence[Microbatch], loss: TokenLoss = cross_entropy) -> mx.array:
    """Token losses of all microbatches, summed: evaluation on one device, in evaluation mode."""
    was_training = model.training
    model.eval()
    total = mx.array(0.0)
    for m in microbatches:
        total = total + loss_share(model(m.inputs), m, mx.array(1.0), loss)
    mx.eval(total)
    model.train(was_training)
    return total


def evaluate(*trees: Any) -> None:
    """Evaluate arrays in trees."""
    mx.eval(*trees)


def number(scalar: mx.array) -> float:
    """The value of a real scalar."""
    value: Any = scalar.item()
    return value


@contextmanager
def masks_of(model: nn.Module, seed: int, step: int, microbatch: int) -> Generator[None]:
    """Draw the random masks that belong to (seed, step, microbatch, layer), and leave MLX's generator as it was."""

    def around(layer: int, call: Any, /, *args: Any, **kwargs: Any) -> Any:
        mx.random.seed(mask_seed(seed, step, microbatch, layer + 1))
        result = call(*args, **kwargs)
        # What is drawn between layers does not depend on how much a layer draws: another stage may run it.
        mx.random.seed(mask_seed(seed, step, microbatch, -layer - 1))
        return result

    with kept_random_state(), intercepted(find_layers(model), around):
        mx.random.seed(mask_seed(seed, step, microbatch, 0))
        yield


class OneDevice:
    """The reference as an engine of `pptrain.train`: what a pipeline is compared with over a whole run."""

    def __init__(self, model: nn.Module, seed: int = 0) -> None:
        self.model = model
        self._seed = seed
        self.num_steps = 0
        self.asks_to_stop = False

    def step_microbatches(
        self, optimizer: optim.Optimizer, microbatches: Sequence[Microbatch], *, max_grad_norm: float | None = None
    ) -> StepResult:
        """One update."""
        result, norm = step(
            self.model, optimizer, microbatches, max_grad_norm=max_grad_norm, seed=self._seed, step=self.num_steps
        )
        self.num_steps += 1
        shares = tuple(number(share) for share in result.losses)
        return StepResult(number(result.loss), shares, result.num_tokens, number(norm), int(self.asks_to_stop))

    def loss_sum(self, microbatches: Sequence[Microbatch]) -> float:
        """Token losses, summed, in evaluation mode."""
        return number(loss_sum(self.model, microbatches))

    def everybody(self, value: float) -> list[float]:
        """There is nobody else."""
        return [value]
