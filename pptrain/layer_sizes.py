"""Layers of each stage, from a config: as asked for, evenly divided, or balanced over the ranks' memory."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from pptrain import partition
from pptrain.config import TrainConfig
from pptrain.machine import look
from pptrain.microbatch import cross_entropy, kept_random_state
from pptrain.plan import Machines, balanced_layers, seconds_at
from pptrain.recipe import make_optimizer
from pptrain.registry import find_schedule
from pptrain.segment import Cut
from pptrain.sizes import measure
from transports import Task, Transport, World


def sizes_asked_for(config: TrainConfig, world: World, num_layers: int) -> tuple[int, ...]:
    """Layers of each stage, checked before any weight is read; for `auto` an even cut, for the time being.

    Raises:
        PartitionError: If the layers cannot be divided so.
    """
    if isinstance(config.layers, tuple):
        return partition.explicit(num_layers, config.layers)
    return partition.even(num_layers, config.num_ranks(world.world_size) * config.stages_on_each_rank)


def balanced_sizes(config: TrainConfig, model: nn.Module, world: World) -> tuple[int, ...]:
    """The cut that `pptrain plan` finds for these machines, taken to be equally fast; the same on every rank.

    Raises:
        PartitionError: If no cut fits, with the closest.
    """
    num_microbatches = config.microbatches or config.batch_size
    with kept_random_state():
        cut = Cut.of(model, mx.zeros((1, 8), mx.int32), cross_entropy)
    rows = -(-config.batch_size // num_microbatches)
    sizes = measure(cut, rows, config.max_seq_length, make_optimizer(config))
    sharing = len(world.local_ranks)
    tasks = {rank: _memory_of_all(world.transport(rank), sharing) for rank in world.local_ranks}
    memory = world.run(tasks)[world.local_ranks[0]]
    machines = Machines(memory, (seconds_at(sizes, 1.0),) * len(memory))
    schedule = find_schedule(config.schedule)(len(memory), num_microbatches)
    found = balanced_layers(sizes, machines, schedule, config.recompute)
    if 0 in world.local_ranks:
        print(f"Balanced cut: --layers {','.join(map(str, found))}", flush=True)
    return found


def _memory_of_all(transport: Transport, sharing: int) -> Task[tuple[float, ...]]:
    """Bytes that each rank may use, of a machine that so many share."""
    mine = look().usable_bytes / sharing
    ranks = range(transport.world_size)
    memory = transport.all_sum(mx.array([mine if rank == transport.rank else 0.0 for rank in ranks]), "memory")
    yield memory
    return tuple(float(each) for each in np.asarray(memory.array))
