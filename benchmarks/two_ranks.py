"""Steady steps of whole processes, side by side: one process, two ring ranks with each schedule, and mlx_lm.lora.

    python benchmarks/two_ranks.py

Trains a llama of 8 layers, hidden 256, in full, with batches of 8 rows and 8 microbatches. Every way runs in turn,
several rounds, in processes of its own; the first steps of each process are left out, and medians are compared. Prints
a table and JSON. Leave the machine alone meanwhile: two ranks need both cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

from pptrain.registry import SCHEDULES

BATCH, MICROBATCHES = 8, 8
LEFT_OUT = 2
"""Steps at the start of each process that are not counted: the first ones allocate and warm up."""


def main() -> None:
    """Run every way in turn and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often each way runs")
    parser.add_argument("--iters", type=int, default=5, help=f"steps of each run; the first {LEFT_OUT} are left out")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each row, a multiple of 32")
    parser.add_argument("--only", default="", help="ways whose name has one of these parts, with | between them")
    parser.add_argument("--mlx-lm", metavar="DIRECTORY", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.mlx_lm:
        run_mlx_lm(Path(args.mlx_lm), args.iters)
        return
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        write_model_and_data(work, args.tokens)
        seen = measure(work, args.rounds, args.iters, args.only)
    show(seen, args)


def write_model_and_data(work: Path, tokens: int) -> None:
    """A random llama of 8 layers and rows of equal length."""
    import mlx.core as mx
    from mlx_lm.models import llama
    from mlx_lm.utils import save_config, save_model

    from pptrain.demo import write_tokenizer

    config = {
        "model_type": "llama",
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "intermediate_size": 768,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "vocab_size": 260,
        "tie_word_embeddings": False,
    }
    mx.random.seed(0)
    save_model(work / "model", llama.Model(llama.ModelArgs.from_dict(config)))
    save_config(config, work / "model" / "config.json")
    write_tokenizer(work / "model")
    draw = random.Random(0)
    (work / "data").mkdir()
    # One byte is one token, and the end token is added: every row has `tokens` tokens.
    rows = ["".join(draw.choices("abcdefgh ", k=tokens - 1)) for _ in range(4 * BATCH)]
    for name in ("train", "valid"):
        (work / "data" / f"{name}.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))


def options(work: Path, out: Path, iters: int, *more: str) -> list[str]:
    """What all ways have in common, as flags of mlx_lm.lora."""
    return [
        *("--model", str(work / "model"), "--data", str(work / "data"), "--adapter-path", str(out), "--train"),
        *("--fine-tune-type", "full", "--num-layers", "-1", "--batch-size", str(BATCH), "--iters", str(iters)),
        *("--steps-per-report", "1", "--val-batches", "0", "--learning-rate", "1e-4", "--save-every", "100000"),
        *more,
    ]


def measure(work: Path, rounds: int, iters: int, only: str) -> dict[str, list[float]]:
    """Seconds of each steady step, by the way that it was made."""
    pptrain = [str(Path(sys.executable).parent / "pptrain"), "train"]

    def train(ranks: int, *more: str) -> Callable[[Path], list[float]]:
        return lambda out: steps_of(pptrain + options(work, out, iters, *more), out, ranks)

    m = str(MICROBATCHES)
    ways = {
        "mlx_lm.lora": lambda out: steps_of(
            [sys.executable, __file__, "--mlx-lm", str(out), "--iters", str(iters)], out
        ),
        "one process, --microbatches 1": train(1, "--microbatches", "1"),
        "one process": train(1, "--microbatches", m),
        **{f"two ranks, {name}": train(2, "--microbatches", m, "--schedule", name) for name in SCHEDULES},
        **{
            f"two ranks, {name}, a single lane": train(2, "--microbatches", m, "--schedule", name, "--lanes", "single")
            for name in ("1f1b", "interleaved", "zb-h2", "zb-v")
        },
        "two ranks, 1f1b, checked messages": train(2, "--microbatches", m, "--check-messages"),
    }
    ways = {name: run for name, run in ways.items() if any(part in name for part in only.split("|"))}
    seen: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds):
        for name, run in ways.items():
            out = work / f"{turn}-{name.replace(' ', '-')}"
            out.mkdir()
            (out / "work").write_text(str(work))
            seen[name] += run(out)[LEFT_OUT:]
            print(f"round {turn + 1} of {rounds}: {name} {statistics.median(seen[name]):.3f} s a step", file=sys.stderr)
    return seen


def steps_of(command: list[str], out: Path, ranks: int = 1) -> list[float]:
    """Seconds of each step of a run, from the metrics that it wrote.

    Ranks are started with the environment that `mlx.launch` sets, but not by it: its threads spin (they select on a
    pipe that is always writable), and here that takes a core from the two that the ranks compute on.
    """
    hosts, processes = out / "hosts.json", list[subprocess.Popen]()
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(ranks)]))
    with (out / "output").open("w") as output:
        for rank in range(ranks):
            ring = {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)} if ranks > 1 else {}
            processes.append(subprocess.Popen(command, env={**os.environ, **ring}, stdout=output, stderr=output))
        codes = [process.wait(timeout=1800) for process in processes]
    if any(codes):
        raise SystemExit(f"{' '.join(command)} ended with {codes}:\n{(out / 'output').read_text()}")
    reports = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [1 / report["iterations_per_second"] for report in reports if "train_loss" in report]


def free_ports(count: int) -> list[int]:
    """Ports that nobody listened on a moment ago."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def run_mlx_lm(out: Path, iters: int) -> None:
    """The same steps by mlx-lm itself, its reports written where pptrain writes its own."""
    import types

    from mlx_lm import lora
    from mlx_lm.tuner.datasets import load_dataset
    from mlx_lm.utils import load

    class Metrics(lora.TrainingCallback):
        def on_train_loss_report(self, train_info: dict) -> None:
            with (out / "metrics.jsonl").open("a") as file:
                print(json.dumps(train_info), file=file)

    flags = lora.build_parser().parse_args(options(Path((out / "work").read_text()), out, iters))
    given = {key: value for key, value in vars(flags).items() if value is not None}
    args = types.SimpleNamespace(**{**lora.CONFIG_DEFAULTS, **given})
    model, tokenizer = load(args.model)
    train, _, _ = load_dataset(args, tokenizer)
    lora.train_model(args, model, train, [], Metrics())


def show(seen: dict[str, list[float]], args: argparse.Namespace) -> None:
    """Print the table, the ratios that are asked for, and all of it as JSON."""
    median = {name: statistics.median(steps) for name, steps in seen.items()}
    one, ideal = median.get("one process", next(iter(median.values()))), 2 * MICROBATCHES / (MICROBATCHES + 1)
    print("\n| way | s a step (median) | min | max | speed-up over one process |\n|---|---|---|---|---|")
    for name, steps in seen.items():
        print(f"| {name} | {median[name]:.3f} | {min(steps):.3f} | {max(steps):.3f} | {one / median[name]:.2f} |")
    pairs = {
        "1f1b over one process, of the ideal 2m/(m+1)": ("one process", "two ranks, 1f1b", ideal),
        "1f1b over sequential": ("two ranks, sequential", "two ranks, 1f1b", 1.0),
        "time of one stage, one microbatch over mlx_lm.lora": ("one process, --microbatches 1", "mlx_lm.lora", 1.0),
        "checked messages over unchecked": ("two ranks, 1f1b, checked messages", "two ranks, 1f1b", 1.0),
        "a single lane over directional ones, 1f1b": ("two ranks, 1f1b, a single lane", "two ranks, 1f1b", 1.0),
    }
    pairs = {name: pair for name, pair in pairs.items() if {*pair[:2]} <= median.keys()}
    ratios = {name: median[a] / median[b] / by for name, (a, b, by) in pairs.items()}
    print("\n| ratio | seen | in single rounds |\n|---|---|---|")
    for name, (a, b, by) in pairs.items():
        of_rounds = [x / y / by for x, y in zip(by_round(seen[a], args), by_round(seen[b], args), strict=True)]
        print(f"| {name} | {ratios[name]:.3f} | {min(of_rounds):.3f} to {max(of_rounds):.3f} |")
    machine = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("mlx", "mlx-lm", "pptrain")},
    }
    print("\n" + json.dumps({"seconds": seen, "median": median, "ratios": ratios, "tokens": args.tokens, **machine}))


def by_round(steps: list[float], args: argparse.Namespace) -> list[float]:
    """The median of each round."""
    count = args.iters - LEFT_OUT
    return [statistics.median(steps[start : start + count]) for start in range(0, len(steps), count)]


def processor() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main()
