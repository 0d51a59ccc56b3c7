"""Whole training steps on one GPU: what a pipeline in one process costs over mlx-lm's own compiled step.

    python benchmarks/one_gpu.py

A random llama of about a billion parameters in bfloat16, LoRA on every layer. Every way takes its steps in turn,
several rounds; medians are compared. Stages of the loopback share the GPU, so nothing overlaps: what is measured is
what staging a graph, microbatches and messages cost. It also compares every gradient with the reference, and the
reference with itself, since not every kernel of every GPU gives the same bits twice.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.tuner.trainer import default_loss
from mlx_lm.tuner.utils import linear_to_lora_layers

from pptrain import Pipeline, reference


def main() -> None:
    """Measure every way, compare the gradients, and print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=512, help="of each row")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    batch = mx.random.randint(0, 32000, (8, args.tokens + 1))
    lengths = mx.array([[0, args.tokens - 10 * row] for row in range(8)])
    mx.eval(batch, lengths)
    print(f"{mx.default_device()}, mlx {version('mlx')}")
    compare(args, batch, lengths)
    measure(args, batch, lengths)


def model_of(args: argparse.Namespace) -> nn.Module:
    """The model, the same at each call."""
    mx.random.seed(0)
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=args.hidden,
            num_hidden_layers=args.layers,
            intermediate_size=4 * args.hidden,
            num_attention_heads=args.hidden // 64,
            num_key_value_heads=args.hidden // 256,
            rms_norm_eps=1e-5,
            vocab_size=32000,
            tie_word_embeddings=False,
        )
    )
    model.set_dtype(mx.bfloat16)
    model.freeze()
    linear_to_lora_layers(model, -1, {"rank": 8, "scale": 20.0, "dropout": 0.0})
    for _, module in model.named_modules():
        if "lora_b" in module:
            module.lora_b = 0.01 * mx.random.normal(module.lora_b.shape)
    model.train()
    mx.eval(model.parameters())
    return model


def compare(args: argparse.Namespace, batch: mx.array, lengths: mx.array) -> None:
    """Every gradient of three stages, compiled and not, against the reference."""
    model = model_of(args)
    expected = reference.value_and_grad(model, batch, lengths, 4)
    show("the reference again", reference.value_and_grad(model, batch, lengths, 4), expected)
    for compile in (False, True):
        for recompute in ("none", "layer"):
            pipeline = Pipeline(model, 3, recompute=recompute, compile=compile)
            way = f"3 stages, compile={compile}, recompute={recompute}"
            show(way, pipeline.value_and_grad(batch, lengths, 4), expected)


def show(way: str, found: reference.Result, expected: reference.Result) -> None:
    """How one result differs from the reference's."""
    pairs = list(zip(tree_flatten(found.grads), tree_flatten(expected.grads), strict=True))
    same = sum(mx.array_equal(a, b).item() for (_, a), (_, b) in pairs)
    worst = max((mx.abs(a - b).max() / mx.abs(b).max()).item() for (_, a), (_, b) in pairs)
    is_loss_equal = found.loss.item() == expected.loss.item()
    print(
        f"{way}: loss equal {is_loss_equal}, {same} of {len(pairs)} gradients bit-equal, worst difference {worst:.1e}"
    )


def measure(args: argparse.Namespace, batch: mx.array, lengths: mx.array) -> None:
    """Median seconds of a step, each way in turn."""
    ways: dict[str, Callable[[], None]] = {"mlx-lm's step": mlx_lm_step(args, batch, lengths)}
    for stages, microbatches, compile in ((1, 1, True), (1, 1, False), (1, 8, True), (4, 8, True), (4, 8, False)):
        name = f"{stages} stages, {microbatches} microbatches, {'compiled' if compile else 'not compiled'}"
        ways[name] = pipeline_step(args, batch, lengths, stages, microbatches, compile)
    seen: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(args.rounds + 2):
        for name, step in ways.items():
            started = time.perf_counter()
            step()
            if turn >= 2:
                seen[name].append(time.perf_counter() - started)
    base = statistics.median(seen["mlx-lm's step"])
    print("\n| way | ms a step (median) | of mlx-lm's |\n|---|---|---|")
    for name, seconds in seen.items():
        median = statistics.median(seconds)
        print(f"| {name} | {1000 * median:.1f} | {median / base:.3f} |")
    print("\n" + json.dumps(seen))


def mlx_lm_step(args: argparse.Namespace, batch: mx.array, lengths: mx.array) -> Callable[[], None]:
    """One step as mlx-lm's trainer compiles it."""
    model, optimizer = model_of(args), optim.Adam(1e-5)
    state = [model.state, optimizer.state, mx.random.state]
    value_and_grad = nn.value_and_grad(model, default_loss)

    @partial(mx.compile, inputs=state, outputs=state)
    def step(batch: mx.array, lengths: mx.array) -> mx.array:
        (loss, _), grads = value_and_grad(model, batch, lengths)
        optimizer.update(model, grads)
        return loss

    return lambda: mx.eval(step(batch, lengths), state)


def pipeline_step(
    args: argparse.Namespace, batch: mx.array, lengths: mx.array, stages: int, microbatches: int, compile: bool
) -> Callable[[], None]:
    """One step of a pipeline in the loopback."""
    model, optimizer = model_of(args), optim.Adam(1e-5)
    pipeline = Pipeline(model, stages, compile=compile)
    return lambda: pipeline.step(optimizer, batch, lengths, microbatches) and None


if __name__ == "__main__":
    main()
