"""One rank of a ring that takes five steps of Adam on a model whose stages share parameters.

    python tests/shared_steps.py OUT KIND

KIND is one of `KINDS`. For each step this rank writes to OUT/rank{r}-{step}.safetensors the parameters that it reads,
as they were before the step, and their gradients (`grad:` and the name); after the last step its parameters again.
The first rank writes what it gathers, as a checkpoint has it, to OUT/gathered.safetensors. Prints each step's global
norm.
"""

import json
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten
from mlx_lm.tuner.lora import LoRALinear
from odd_models import PerLayerTable, SharedBlock, UsedTwice, built
from tiny import batch

from pptrain import Pipeline
from transports.ring import RingWorld

STEPS, MICROBATCHES, MAX_NORM = 5, 3, 0.5


def adapters_on_a_shared_block() -> nn.Module:
    """LoRA on the block alone, so that all ranks train the same adapters and nothing else."""
    model = built(SharedBlock, 7)
    model.freeze()
    model.shared.linear = LoRALinear.from_base(model.shared.linear, r=2)
    model.shared.linear.lora_b = 0.1 * mx.random.normal(model.shared.linear.lora_b.shape)
    return model


KINDS = {
    "block": lambda: built(SharedBlock, 7),
    "block used twice": lambda: built(UsedTwice, 4),
    "adapters": adapters_on_a_shared_block,
    "tables": lambda: built(PerLayerTable, 6),
}


def main() -> None:
    out, model = Path(sys.argv[1]), KINDS[sys.argv[2]]()
    world = RingWorld()
    rank, optimizer = world.local_ranks[0], optim.Adam(1e-2)
    pipeline = Pipeline(model, world.world_size, transport=world)
    pipeline.load()

    def write(step: int, grads: dict[str, mx.array]) -> None:
        own = {name: pipeline.slots[name].array for name in pipeline.own_names(rank)}
        mx.save_safetensors(str(out / f"rank{rank}-{step}.safetensors"), own | grads)

    norms = []
    for step in range(STEPS):
        data = batch(rows=5, seed=step)
        grads = tree_flatten(pipeline.value_and_grad(*data, MICROBATCHES).grads)
        write(step, {f"grad:{name}": grad for name, grad in grads})
        norms.append(pipeline.step(optimizer, *data, MICROBATCHES, max_grad_norm=MAX_NORM).grad_norm)
    write(STEPS, {})
    gathered = pipeline.gather()
    if rank == 0:
        mx.save_safetensors(str(out / "gathered.safetensors"), gathered)
    print(json.dumps(norms))
    world.close()


if __name__ == "__main__":
    main()
