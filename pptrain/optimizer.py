"""From each stage's gradients to one update: shared parameters summed, the global norm, clipping, MLX's own optimizers.

The norm is summed leaf by leaf in the whole model's tree order, so that it is one device's norm bit for bit, wherever
the model was cut and whoever holds a leaf.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from pptrain.errors import NonFiniteError
from pptrain.executor import materialize
from pptrain.model import Slot
from transports import Task, Transport

Grads = dict[str, mx.array]
"""float32 gradients by whole-model name."""


def square_sum(grad: mx.array) -> mx.array:
    """A leaf's part of the squared norm, as `mlx.optimizers.clip_grad_norm` computes it for float32."""
    return grad.square().sum()


def add_up(numbers: Iterable[float]) -> float:
    """Add float32 numbers in the order given, each sum rounded to float32 as a device does."""
    total = np.float32(0)
    with np.errstate(over="ignore", invalid="ignore"):  # an infinity is for `check_finite` to report
        for number in numbers:
            total += np.float32(number)
    return float(total)


def global_norm(squares: Iterable[float]) -> mx.array:
    """The norm over all leaves, from their squared norms in tree order; the root is the device's own."""
    return mx.sqrt(mx.array(add_up(squares)))


def clip(grads: Mapping[str, mx.array], norm: mx.array, max_norm: float) -> Grads:
    """Scale gradients so that their global norm is at most `max_norm`; the formula is `clip_grad_norm`'s."""
    factor = mx.minimum(max_norm / (norm + 1e-6), 1.0)
    return {name: grad * factor for name, grad in grads.items()}


def check_finite(losses: Sequence[float], squares: Mapping[str, float]) -> None:
    """Refuse a step whose loss or gradients are not numbers; every rank sees the same values and decides alike.

    Raises:
        NonFiniteError: Naming the first microbatch or parameter; nothing has been changed.
    """
    bad = [f"the loss of microbatch {j}" for j, loss in enumerate(losses) if not _finite(loss)]
    bad += [f"the gradient of {name}" for name, square in squares.items() if not _finite(square)]
    if bad:
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        raise NonFiniteError(
            f"[step] {bad[0]} is not a finite number{more}. Expected finite losses and gradients. Nothing was updated: "
            "lower the learning rate, set --max-grad-norm, or look at the batch."
        )


def _finite(value: float) -> bool:
    return value - value == 0


def update(
    optimizer: optim.Optimizer, model: nn.Module, slots: Mapping[str, Slot], grads: Mapping[str, mx.array]
) -> None:
    """Update the parameters that have a gradient here; other ranks update the others.

    Gradients are cast to the parameter's dtype first, so that bfloat16 parameters stay bfloat16.
    """
    cast = {name: grad.astype(slots[name].array.dtype) for name, grad in grads.items()}
    optimizer.update(model, to_tree(cast))
    materialize([slots[name].array for name in grads], optimizer.state)


def state_leaves(optimizer: optim.Optimizer, names: Iterable[str]) -> dict[str, mx.array]:
    """An optimizer's counters (`step`, `learning_rate`), and what it holds for these parameters: `a.b.weight.m`."""
    leaves: dict[str, mx.array] = dict(tree_flatten(optimizer.state))  # pyright: ignore[reportArgumentType]
    kept = {"", *names}
    return {leaf: array for leaf, array in leaves.items() if leaf.rpartition(".")[0] in kept}


def restore_state(optimizer: optim.Optimizer, leaves: Mapping[str, mx.array]) -> None:
    """Give an optimizer what `state_leaves` of another one returned."""
    optimizer.state = to_tree(leaves)


def to_tree(leaves: Mapping[str, mx.array]) -> Any:
    """A tree with the whole model's names."""
    return tree_unflatten(list(leaves.items())) if leaves else {}


def add_stage(grads: Grads, more: Mapping[str, mx.array]) -> None:
    """Add a stage's gradients to those of the rank's stages before it; two of them may share a parameter."""
    for name, grad in more.items():
        grads[name] = grads[name] + grad if name in grads else grad


def add_shared(transport: Transport, own: Grads, ranks: Sequence[int], name: str, template: mx.array) -> Task[None]:
    """Give every rank that holds a shared parameter the sum of all their gradients for it, the same bits on all.

    The sum goes up the ranks, each adding its own, and comes back down; a rank in between hands it on (a ring reaches
    its neighbours only).

    Args:
        transport: This rank's.
        own: This rank's gradients; the shared one is replaced.
        ranks: The ranks that hold the parameter, ascending.
        name: The parameter.
        template: The parameter, for its shape.
    """
    first, last, rank = ranks[0], ranks[-1], transport.rank
    if not first <= rank <= last:
        return
    total = own.get(name)
    if rank > first:
        below = transport.receive(template.shape, mx.float32, rank - 1, f"sum of {name}")
        yield transport.arrive(below)
        total = below.array if total is None else below.array + total
    if rank < last:
        assert total is not None
        yield transport.send(total, rank + 1, f"sum of {name}")
        above = transport.receive(template.shape, mx.float32, rank + 1, f"sum of {name}")
        yield transport.arrive(above)
        total = above.array
    if rank > first:
        assert total is not None
        yield transport.send(total, rank - 1, f"sum of {name}")
    if name in own and total is not None:
        own[name] = total
