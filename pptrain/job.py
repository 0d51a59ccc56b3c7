"""A whole run from its config: world, model, data, agreement, pipeline, loop, and the files it leaves behind."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx_lm.tuner.callbacks import TrainingCallback, get_reporting_callbacks
from mlx_lm.tuner.utils import print_trainable_parameters
from mlx_lm.utils import maybe_set_recommended_wired_limit

from pptrain import partition
from pptrain.agreement import agree, settings_of
from pptrain.checkpoint import save_adapter_config, save_adapters, save_whole_model
from pptrain.config import TrainConfig
from pptrain.data import Data, load_data
from pptrain.errors import ConfigError
from pptrain.machine import look
from pptrain.microbatch import cross_entropy, kept_random_state
from pptrain.model import find_layers
from pptrain.perfetto import chrome_trace
from pptrain.pipeline import Pipeline
from pptrain.plan import Machines, balanced_layers, seconds_at
from pptrain.recipe import Loaded, load_base, load_trained, make_optimizer, prepare_training
from pptrain.registry import find_schedule
from pptrain.report import Console, Metrics
from pptrain.sizes import measure
from pptrain.stage import Cut
from pptrain.timeline import on_one_clock
from pptrain.train import Run, evaluate
from transports import Lanes, Task, Transport, World, detect, open_world

logger = logging.getLogger(__name__)
T = TypeVar("T")

_LANES: dict[str, Lanes | None] = {"auto": None, "single": "single", "direction": "directional"}


@dataclass(frozen=True, slots=True)
class Done:
    """What is left in memory when a run has ended."""

    pipeline: Pipeline
    optimizer: optim.Optimizer | None
    losses: list[float]
    """Of each iteration."""
    test_loss: float | None


def execute(config: TrainConfig) -> Done:
    """Do what a config asks for: train, test, or both.

    Raises:
        UserError: A mistake in what was asked for, found before the first step.
        RanksDisagree: If ranks were started with different settings.
        TransportError: What went wrong on the wire.
    """
    with opened(config) as world:
        loaded = load_base(config)
        sizes = cut_sizes(config, world, len(find_layers(loaded.model)))
        data = load_data(config, loaded.tokenizer, vocabulary_size(loaded))
        if config.train:
            prepare_training(loaded.model, config)
        else:
            load_trained(loaded.model, config.adapter_path)
        settings = settings_of(config, loaded.path, data.fingerprint()[:12], sizes)
        if config.layers == "auto":
            settings["layers"] = "auto"
        _on_every_rank(world, lambda transport: agree(transport, settings))
        if config.layers == "auto":
            sizes = balanced_sizes(config, loaded.model, world)
        pipeline = make_pipeline(config, loaded, sizes, world)
        return _carry_out(config, loaded, data, pipeline)


def _carry_out(config: TrainConfig, loaded: Loaded, data: Data, pipeline: Pipeline) -> Done:
    maybe_set_recommended_wired_limit()
    pipeline.load()
    is_first = 0 in pipeline.world.local_ranks
    optimizer, losses = None, list[float]()
    if config.train:
        optimizer = make_optimizer(config)
        losses = _train(config, loaded, data, pipeline, optimizer, is_first)
    test_loss = None
    if config.test:
        test_loss = evaluate(pipeline, data.test, config, config.test_batches)
        if is_first:
            print(f"Test loss {test_loss:.3f}, Test ppl {math.exp(test_loss):.3f}.", flush=True)
    return Done(pipeline, optimizer, losses, test_loss)


def _train(
    config: TrainConfig, loaded: Loaded, data: Data, pipeline: Pipeline, optimizer: optim.Optimizer, is_first: bool
) -> list[float]:
    directory = Path(config.adapter_path)
    if is_first:
        save_adapter_config(directory, _adapter_config(config))
        print_trainable_parameters(loaded.model)
        print(f"Supervised tokens in the training set: {data.supervised_tokens:,}", flush=True)

    def save(iteration: int | None) -> None:
        arrays = pipeline.gather()
        if is_first:
            save_adapters(directory, arrays, iteration)

    with reporting(config, directory, is_first) as (callbacks, console):
        run = Run(pipeline, config, optimizer, data.train, data.valid, callbacks, save)
        if console is not None:
            run.advanced = console.advance
        run.run()
    save(None)
    if config.trace is not None:
        _write_trace(Path(config.trace), pipeline, is_first)
    if config.fine_tune_type == "full":
        arrays = pipeline.gather()
        if is_first:
            parts = (loaded.model, loaded.tokenizer, loaded.config)
            save_whole_model(directory, loaded.path, pipeline.slots, arrays, parts)
    return run.losses


def _write_trace(path: Path, pipeline: Pipeline, is_first: bool) -> None:
    spans = on_one_clock(pipeline)
    if is_first:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(chrome_trace(spans), encoding="utf-8")


def vocabulary_size(loaded: Loaded) -> int:
    """How many tokens the model tells apart, from the shape of its logits; nothing is evaluated."""
    return loaded.model(mx.zeros((1, 1), mx.int32)).shape[-1]


def cut_sizes(config: TrainConfig, world: World, num_layers: int) -> tuple[int, ...]:
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
    memory = _on_every_rank(world, lambda transport: _memory_of_all(transport, len(world.local_ranks)))[0]
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


def _on_every_rank(world: World, task: Callable[[Transport], Task[T]]) -> list[T]:
    done = world.run({rank: task(world.transport(rank)) for rank in world.local_ranks})
    return [done[rank] for rank in world.local_ranks]


def make_pipeline(config: TrainConfig, loaded: Loaded, sizes: Sequence[int], world: World) -> Pipeline:
    """The pipeline that a config asks for."""
    return Pipeline(
        loaded.model,
        layers=sizes,
        schedule=config.schedule,
        stages_per_rank=config.stages_per_rank,
        transport=world,
        recompute=config.recompute,
        seed=config.seed,
    )


@contextmanager
def reporting(
    config: TrainConfig, directory: Path, is_first: bool
) -> Generator[tuple[list[TrainingCallback], Console | None]]:
    """Who is told of each report: on the first rank the terminal, `metrics.jsonl`, and mlx-lm's call-backs."""
    if not is_first:
        yield [], None
        return
    settings: Any = vars(config.namespace())  # mlx-lm's annotation says a string, its call-backs take a dict
    services = get_reporting_callbacks(
        config.report_to, project_name=config.project_name, log_dir=config.adapter_path, config=settings
    )
    with Console(config.iters) as console:
        yield [console, Metrics(directory / "metrics.jsonl"), *([services] if services else [])], console


@contextmanager
def opened(config: TrainConfig) -> Generator[World]:
    """The world that a config asks for, closed at the end."""
    world = _open(config)
    try:
        yield world
    except BaseException as error:
        world.fail(error)  # The other ranks would wait for this one.
        raise
    world.close()


def _open(config: TrainConfig) -> World:
    launched = detect()
    name = (launched or "loopback") if config.transport == "auto" else config.transport
    if name == "loopback" and launched:
        raise ConfigError(
            "[transport] loopback runs every stage in one process, but a launcher has started several over "
            f"{launched}. Leave out --transport, or start one process without mlx.launch."
        )
    return open_world(
        name,
        config.num_ranks(1) if name == "loopback" else None,
        lanes=_LANES[config.lanes],
        check_messages=config.check_messages,
        timeout_seconds=config.timeout,
    )


def _adapter_config(config: TrainConfig) -> dict[str, Any]:
    """What mlx-lm writes, and pptrain's own settings besides."""
    settings = vars(config.namespace())
    return {**settings, "lora_parameters": None} if config.fine_tune_type == "full" else settings
