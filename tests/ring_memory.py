"""One rank of a ring that loads a model directory and says what it holds: `python tests/ring_memory.py MODEL`."""

import json
import sys

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import load

from pptrain import Pipeline
from transports.ring import RingWorld

mx.set_cache_limit(0)  # a buffer from the cache may be larger than what is asked for
world = RingWorld()
model, _ = load(sys.argv[1], lazy=True)
pipeline = Pipeline(model, transport=world)
before = mx.get_active_memory()
mx.reset_peak_memory()
pipeline.load()
active, peak = mx.get_active_memory(), mx.get_peak_memory()
own = sum(pipeline.slots[name].array.nbytes for name in pipeline.own_names(world.local_ranks[0]))
sizes = [array.nbytes for _, array in tree_flatten(model.parameters())]
seen = {"before": before, "active": active, "peak": peak, "own": own, "whole": sum(sizes), "largest": max(sizes)}
print(json.dumps(seen))
world.close()
