"""One rank of a ring that takes five training steps, started by `test_ring_training`.

    python tests/ring_steps.py OUT {tied,untied} {directional,single} {float32,bfloat16}

Writes the parameters that this rank's stage reads to OUT/rank{r}.safetensors, and prints the loss and the global norm
of each step.
"""

import json
import sys
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optim
from tiny import batch, llama

from pptrain import Pipeline
from transports import World
from transports.ring import RingWorld

STEPS, MICROBATCHES, MAX_NORM = 5, 3, 0.5


def train(
    world: World | str, num_stages: int, tied: bool, dtype: mx.Dtype
) -> tuple[Pipeline, list[tuple[float, float]]]:
    """Five steps of Adam with clipping; the same on every rank and in the loopback. Also each step's loss and norm."""
    model = llama(6, tie_word_embeddings=tied, dtype=dtype)
    pipeline, optimizer = Pipeline(model, num_stages, transport=world), optim.Adam(1e-2)
    steps = [
        pipeline.step(optimizer, *batch(rows=5, seed=step), MICROBATCHES, max_grad_norm=MAX_NORM)
        for step in range(STEPS)
    ]
    return pipeline, [(step.loss, step.grad_norm) for step in steps]


def main() -> None:
    out, tied, lanes, dtype = Path(sys.argv[1]), sys.argv[2] == "tied", sys.argv[3], getattr(mx, sys.argv[4])
    world = RingWorld(lanes=lanes)
    pipeline, seen = train(world, world.world_size, tied, dtype)
    print(json.dumps(seen))
    rank = world.local_ranks[0]
    own = {name: pipeline.slots[name].array for name in pipeline.own_names(rank)}
    mx.save_safetensors(str(out / f"rank{rank}.safetensors"), own)
    world.close()


if __name__ == "__main__":
    main()
