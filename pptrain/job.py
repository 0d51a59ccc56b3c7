"""A whole run from its config: world, model, data, agreement, pipeline, loop, and the files it leaves behind."""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx_lm.tuner.callbacks import TrainingCallback, get_reporting_callbacks
from mlx_lm.tuner.utils import print_trainable_parameters
from mlx_lm.utils import maybe_set_recommended_wired_limit

from pptrain.agreement import Settings, agree, fingerprint_of, settings_of
from pptrain.checkpoint import (
    ADAPTERS,
    BEST,
    save_adapter_config,
    save_adapters,
    save_whole_model,
    saving,
    to_adapter_path,
)
from pptrain.config import TrainConfig
from pptrain.data import Data, load_data
from pptrain.durable import At, nothing, write_whole
from pptrain.errors import ConfigError, NonFiniteError, SaveError
from pptrain.fetch import fetched
from pptrain.layer_sizes import balanced_sizes, sizes_asked_for
from pptrain.perfetto import chrome_trace
from pptrain.pipeline import Pipeline
from pptrain.progress import Progress
from pptrain.recipe import Loaded, load_base, load_trained, make_optimizer, prepare_training
from pptrain.record import METRICS, Record, Start, note_start
from pptrain.report import Console, Metrics
from pptrain.resume import Asked, choose, put_back
from pptrain.saving import Checkpoints
from pptrain.stopping import asked_by_signals
from pptrain.store import names_in
from pptrain.timeline import on_one_clock
from pptrain.trace import count_layers
from pptrain.train import Ended, Run, evaluate
from transports import Lanes, World, detect, open_world

logger = logging.getLogger(__name__)

_LANES: dict[str, Lanes | None] = {"auto": None, "single": "single", "direction": "directional"}


@dataclass(frozen=True, slots=True)
class Done:
    """What is left in memory when a run has ended."""

    pipeline: Pipeline
    optimizer: optim.Optimizer | None
    losses: list[float]
    """Of each iteration of this process."""
    test_loss: float | None
    ended: Ended = "done"


@dataclass(frozen=True, slots=True)
class _Job:
    """What a run works with."""

    config: TrainConfig
    loaded: Loaded
    data: Data
    pipeline: Pipeline
    settings: Settings
    """What all ranks agreed on."""
    fingerprint: Settings
    command: Sequence[str]
    at: At

    @property
    def is_first(self) -> bool:
        """Whether this process has the first rank."""
        return 0 in self.pipeline.world.local_ranks


def execute(config: TrainConfig, at: At = nothing, command: Sequence[str] = ()) -> Done:
    """Do what a config asks for: train, test, or both.

    Args:
        config: What is asked for.
        at: Told of each point of writing a checkpoint.
        command: The words that started this process, to be written down.

    Raises:
        UserError: A mistake in what was asked for, found before the first step.
        RanksDisagree: If ranks were started with different settings.
        SaveError: If what was trained cannot be written.
        TransportError: What went wrong on the wire.
    """
    with (
        opened(config) as world,
        fetched(config, world, lambda loaded: _own_names(config, loaded, world)) as directory,
    ):
        loaded = load_base(config, directory)
        sizes = sizes_asked_for(config, world, count_layers(loaded.model))
        num_tokens = vocabulary_size(loaded)
        if config.train:
            prepare_training(loaded.model, config)
        else:
            load_trained(loaded.model, config.adapter_path)
        pipeline = make_pipeline(config, loaded, sizes, world)
        if config.train:
            pipeline.dry_run()  # before the data, which may take long to read
        data = load_data(config, loaded.tokenizer, num_tokens)
        settings = settings_of(config, loaded.path, data.fingerprint()[:12], sizes)
        if config.layers == "auto":
            settings["layers"] = "auto"
        pipeline.run(lambda transport: agree(transport, settings))
        if config.layers == "auto":
            sizes = balanced_sizes(config, loaded.model, world)
            pipeline = make_pipeline(config, loaded, sizes, world)
        if config.train and 0 in world.local_ranks:
            warn_of_order(pipeline)
        fingerprint = fingerprint_of(settings, data.training_fingerprint()[:12])
        settings["layers"] = ",".join(map(str, sizes))
        return _carry_out(_Job(config, loaded, data, pipeline, settings, fingerprint, command, at))


def warn_of_order(pipeline: Pipeline) -> None:
    """Say where the cut keeps gradients from being bit-equal to one device's; see `Pipeline.reordered`."""
    if layers := pipeline.reordered:
        logger.warning(
            "The cut before layer %s adds gradients in another order than one device: those of what lies before it "
            "differ in their last bits. Another --layers may keep the order.",
            ", ".join(map(str, layers)),
        )


def _own_names(config: TrainConfig, loaded: Loaded, world: World) -> set[str]:
    """What this process's stages read of a model that has no adapters yet."""
    sizes = sizes_asked_for(config, world, count_layers(loaded.model))
    pipeline = make_pipeline(config, loaded, sizes, world)
    return {name for rank in world.local_ranks for name in pipeline.own_names(rank)}


def _carry_out(job: _Job) -> Done:
    config, pipeline = job.config, job.pipeline
    maybe_set_recommended_wired_limit()
    optimizer, run = None, None
    if config.train:
        optimizer = make_optimizer(config)
        start, checkpoints = open_checkpoints(config, pipeline, optimizer, job.fingerprint, job.at)
        pipeline.load()
        run = _train(job, optimizer, start, checkpoints)
    else:
        pipeline.load()
    losses, ended = (run.losses, run.ended) if run else ([], "done")
    test_loss = None
    if config.test and ended != "asked":
        test_loss = evaluate(pipeline, job.data.test, config, config.test_batches)
        if job.is_first:
            print(f"Test loss {test_loss:.3f}, Test ppl {math.exp(test_loss):.3f}.", flush=True)
    return Done(pipeline, optimizer, losses, test_loss, ended)


def open_checkpoints(
    config: TrainConfig, pipeline: Pipeline, optimizer: optim.Optimizer, fingerprint: Settings, at: At = nothing
) -> tuple[Progress | None, Checkpoints | None]:
    """Where the run goes on, its parameters and moments put back, and where its checkpoints go.

    Raises:
        CheckpointError: If there are checkpoints and none can be used.
        ConfigError: If there are some that nobody asked for, or of a run with other settings.
    """
    progress, chosen = None, None
    asked = Asked.of(config.resume, config.checkpoint_dir)
    if asked is not None:
        names = {rank: pipeline.updated_by(rank) for rank in pipeline.world.local_ranks}
        chosen = pipeline.run(lambda transport: choose(transport, asked, names[transport.rank], fingerprint))[0]
        if chosen is not None:
            wanted = list(dict.fromkeys(name for some in names.values() for name in some))
            progress = put_back(asked.directory / str(chosen), wanted, pipeline.slots, optimizer)
            _check_iterations(config, progress, asked.directory / str(chosen))
    if config.checkpoint_dir is None:
        return progress, None
    checkpoints = Checkpoints(Path(config.checkpoint_dir), config.keep, fingerprint, config.gather, at)
    if config.resume == "auto":
        there = names_in(Path(config.checkpoint_dir))
        checkpoints.begin(chosen, [name for name in there if chosen is None or name > chosen])
    return progress, checkpoints


def _check_iterations(config: TrainConfig, progress: Progress, folder: Path) -> None:
    if progress.iteration > config.iters:
        raise ConfigError(
            f"[iters] {folder} is of iteration {progress.iteration}, beyond --iters {config.iters}. Expected the total "
            "number of iterations, from the beginning. Raise --iters."
        )


def _train(job: _Job, optimizer: optim.Optimizer, start: Progress | None, checkpoints: Checkpoints | None) -> Run:
    config, pipeline, directory = job.config, job.pipeline, Path(job.config.adapter_path)
    if job.is_first:
        save_adapter_config(directory, _adapter_config(config))
        if start is None or start.iteration < config.iters:
            _note_start(job, directory, start.iteration if start else 0)
        print_trainable_parameters(job.loaded.model)
        print(f"Supervised tokens in the training set: {job.data.supervised_tokens:,}", flush=True)
    with reporting(config, directory, job.is_first, start) as (callbacks, console):
        run = Run(pipeline, config, optimizer, job.data.train, job.data.valid, callbacks, start=start)
        run.save = lambda iteration: _save(job, iteration)
        if config.save_best:
            run.save_best = lambda: _save(job, None, BEST)
        if console is not None:
            run.advanced = console.advance
        with stopping(pipeline, checkpoints, optimizer, run):
            run.run()
    _finish(job, run)
    return run


def _note_start(job: _Job, directory: Path, iteration: int) -> None:
    config, world = job.config, job.pipeline.world
    trace = str(Path(config.trace).absolute()) if config.trace else None
    transport = detect() or "loopback"
    record = Record(config.model, config.iters, world.world_size, transport, trace, job.settings)
    with to_adapter_path(directory):
        note_start(directory, record, Start.now(iteration, job.command))


@contextmanager
def stopping(
    pipeline: Pipeline, checkpoints: Checkpoints | None, optimizer: optim.Optimizer, run: Run
) -> Generator[None]:
    """Where there are checkpoints, write them, and let a signal end the run with one."""
    if checkpoints is None:
        yield
        return

    def ask() -> None:
        pipeline.asks_to_stop = True

    def keep(progress: Progress) -> str:
        folder = checkpoints.save(pipeline, optimizer, progress)
        return f" The checkpoint of before is {folder}." if folder else ""

    run.checkpoint = keep
    with asked_by_signals(pipeline.world, ask):
        yield


def _finish(job: _Job, run: Run) -> None:
    """What a run leaves behind when it has ended; one that was stopped leaves it to whoever goes on."""
    config, pipeline = job.config, job.pipeline
    if run.ended == "asked":
        if job.is_first:
            where = (
                f"after iteration {run.at.iteration} of {config.iters}, with a checkpoint in {config.checkpoint_dir}"
            )
            print(f"Stopped {where}. Start the same command with --resume auto to go on.", flush=True)
        return
    if run.ended == "early" and job.is_first:
        loss = f"{run.at.best.loss:.3f}, {run.at.best.num_worse} validations ago"
        print(f"Stopped early after iteration {run.at.iteration}: the best validation loss was {loss}.", flush=True)
    _save(job, None)
    if config.trace is not None and pipeline.ran:  # nothing ran where all was trained already
        _write_trace(Path(config.trace), pipeline, job.is_first)
    if config.fine_tune_type == "full":
        arrays = pipeline.gather()
        if job.is_first:
            loaded, directory = job.loaded, Path(config.adapter_path)
            parts = (loaded.model, loaded.tokenizer, loaded.config)
            save_whole_model(directory, loaded.path, pipeline.slots, arrays, parts)


def _save(job: _Job, iteration: int | None, name: str = ADAPTERS) -> None:
    arrays = job.pipeline.gather()
    if job.is_first:
        try:
            save_adapters(Path(job.config.adapter_path), arrays, iteration, name)
        except SaveError as error:
            raise SaveError(f"{error} {_what_is_left(job.config)}") from error


def _what_is_left(config: TrainConfig) -> str:
    """What can be done after a save that failed."""
    if config.checkpoint_dir is None:
        return "There is no checkpoint to go on from: --checkpoint-dir was not given."
    return f"Then start the same command with --resume auto: the newest checkpoint is in {config.checkpoint_dir}."


def _write_trace(path: Path, pipeline: Pipeline, is_first: bool) -> None:
    spans = on_one_clock(pipeline)
    if is_first:
        text = chrome_trace(spans).encode()
        with saving(path):
            write_whole(path, lambda file: file.write(text))


def vocabulary_size(loaded: Loaded) -> int:
    """How many tokens the model tells apart, from the shape of its logits; nothing is evaluated."""
    return loaded.model(mx.zeros((1, 1), mx.int32)).shape[-1]


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
    config: TrainConfig, directory: Path, is_first: bool, start: Progress | None = None
) -> Generator[tuple[list[TrainingCallback], Console | None]]:
    """Who is told of each report: on the first rank the terminal, `metrics.jsonl`, and mlx-lm's call-backs."""
    if not is_first:
        yield [], None
        return
    settings: Any = vars(config.namespace())  # mlx-lm's annotation says a string, its call-backs take a dict
    services = get_reporting_callbacks(
        config.report_to, project_name=config.project_name, log_dir=config.adapter_path, config=settings
    )
    done = start.iteration if start else 0
    with Console(config.iters, initial=done) as console:
        yield [console, Metrics(directory / METRICS, done), *([services] if services else [])], console


@contextmanager
def opened(config: TrainConfig) -> Generator[World]:
    """The world that a config asks for, closed at the end."""
    world = _open(config)
    try:
        yield world
    except NonFiniteError:
        world.close()  # Every rank ends by it alike, none because of another.
        raise
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
