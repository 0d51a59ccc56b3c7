"""One rank of a ring that loads a model directory and says what it holds: `python tests/ring_memory.py MODEL`."""

import json
import sys

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import load

from pptrain import Pipeline
from transports.ring import RingWorld

world = RingWorld()
model, _ = load(sys.argv[1], lazy=True)
pipeline = Pipeline(model, transport=world)
before = mx.get_active_memory()
pipeline.load()
own = sum(pipeline.slots[name].array.nbytes for name in pipeline.own_names(world.local_ranks[0]))
whole = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
print(json.dumps({"before": before, "active": mx.get_active_memory(), "own": own, "whole": whole}))
world.close()
