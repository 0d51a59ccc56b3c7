"""`pptrain train --demo`: train a small model over three stages and on one device, and compare every bit."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten

from pptrain.config import TrainConfig, parse
from pptrain.data import load_data
from pptrain.demo import demo_settings, write_demo
from pptrain.errors import ConfigError
from pptrain.job import Done, execute, vocabulary_size
from pptrain.recipe import load_base, make_optimizer, prepare_training
from pptrain.reference import OneDevice
from pptrain.schedule import Schedule
from pptrain.simulate import simulate
from pptrain.timeline import bubble_share, draw
from pptrain.train import Run

DIRECTORY = Path("pptrain-demo")


def run(options: Sequence[str]) -> int:
    """Run the demo; returns the exit code: 1 if any tensor differs from one device's."""
    started = time.perf_counter()
    config = parse(options, demo_settings(DIRECTORY))
    if config.transport not in ("auto", "loopback"):
        raise ConfigError(f"[demo] The demo runs in one process, not over {config.transport}. Leave out --transport.")
    print(f"Writing a small llama, a byte-level tokenizer and a small data set to {DIRECTORY}/", flush=True)
    write_demo(DIRECTORY)
    stages = config.num_ranks(1) * config.stages_on_each_rank
    print(f"Training {config.fine_tune_type} over {stages} stages with {config.schedule}, in one process.", flush=True)
    done = execute(config, command=["pptrain", "train", *options])
    _show_timeline(config, done)
    print("\nTraining the same on one device.", flush=True)
    return _compare(config, done, *_on_one_device(config), started)


def _show_timeline(config: TrainConfig, done: Done) -> None:
    spans, placement = done.pipeline.spans, done.pipeline.placement
    m = len({span.action.microbatch for span in spans[0]})
    lists = tuple(tuple(span.action for span in spans[rank]) for rank in sorted(spans))
    ran = Schedule(config.schedule, m, placement, lists)
    sizes = f"{len(placement)} stages, {m} microbatches"
    print(f"\nThe last step as it ran ({config.schedule}, {sizes}; a dot is a bubble):\n")
    print(draw(ran))
    print(
        f"\nBubble share {bubble_share(spans):.0%} by the ranks' clocks; {simulate(ran).bubble:.0%} with equal stages."
    )


def _on_one_device(config: TrainConfig) -> tuple[OneDevice, optim.Optimizer, list[float]]:
    loaded = load_base(config)
    data = load_data(config, loaded.tokenizer, vocabulary_size(loaded))
    prepare_training(loaded.model, config)
    engine, optimizer = OneDevice(loaded.model, config.seed), make_optimizer(config)
    loop = Run(engine, config, optimizer, data.train, data.valid)
    loop.run()
    return engine, optimizer, loop.losses


def _compare(
    config: TrainConfig, done: Done, engine: OneDevice, optimizer: optim.Optimizer, losses: list[float], started: float
) -> int:
    pairs: list[tuple[str, Mapping[str, mx.array], Mapping[str, mx.array]]] = [
        (
            "parameters",
            _leaves(done.pipeline.model.trainable_parameters()),
            _leaves(engine.model.trainable_parameters()),
        ),
        ("optimizer state", _leaves(done.optimizer.state if done.optimizer else {}), _leaves(optimizer.state)),
    ]
    unequal = [
        f"{kind} {name}" for kind, ours, theirs in pairs for name in theirs if not _equal(ours.get(name), theirs[name])
    ]
    unequal += [f"loss of iteration {i}" for i, (a, b) in enumerate(zip(done.losses, losses, strict=True), 1) if a != b]
    tensors, seconds = sum(len(theirs) for _, _, theirs in pairs), time.perf_counter() - started
    print(f"Loss {losses[0]:.3f} at the first iteration, {losses[-1]:.3f} at the last; {seconds:.0f} s in all.")
    if unequal:
        compared = f"{tensors} tensors and {len(losses)} losses"
        print(f"NOT EQUAL to one device: {len(unequal)} of {compared} differ, first {unequal[0]}.", file=sys.stderr)
        return 1
    print(f"Compared {tensors} tensors and {len(losses)} losses with one device: all bit-equal.")
    model, adapters = config.model, config.adapter_path
    prompt = "--prompt 'letters from C to H' --max-tokens 24"
    print(f"\nTry next:\n  mlx_lm.generate --model {model} --adapter-path {adapters} {prompt}")
    return 0


def _leaves(tree: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(tree))


def _equal(a: mx.array | None, b: mx.array) -> bool:
    return a is not None and a.dtype == b.dtype and bool(mx.array_equal(a, b).item())
