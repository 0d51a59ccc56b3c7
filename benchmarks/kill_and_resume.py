"""Random SIGKILLs of a random rank of three, each followed by the same start command; the end is the unbroken run's.

    python benchmarks/kill_and_resume.py

A tiny llama is trained with LoRA over the ring on 127.0.0.1, each rank with a checkpoint directory of its own, as on
three machines. Each kill comes at a random moment of a random iteration; the other ranks have to end by themselves.
Prints a table; ends with code 1 if the final adapters, or any reported loss, differ from those of a run that was never
killed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

RANKS = 3
ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Train once without and once with kills, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--iters", type=int, default=200)
    parser.add_argument("--every", type=int, default=5, help="iterations between two checkpoints")
    parser.add_argument("--seed", type=int, default=0, help="of when and whom to kill")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        write_model_and_data(work)
        runs = unbroken, killed = [Training(work, name, args.iters, args.every) for name in ("unbroken", "killed")]
        try:
            unbroken.start()
            unbroken.finish()
            rows = kill_and_go_on(killed, args.kills, random.Random(args.seed))
        finally:
            for each in runs:
                each.end()
        show(rows)
        sys.exit(compare(killed, unbroken))


def write_model_and_data(work: Path) -> None:
    """The demo's model, tokenizer and data."""
    import mlx.core as mx

    from pptrain.demo import write_demo

    mx.disable_compile()
    write_demo(work)


class Training:
    """The three processes of one run, and the one command that starts them."""

    def __init__(self, work: Path, name: str, iters: int, every: int) -> None:
        self.folder, self.iters = work / name, iters
        self.folder.mkdir()
        (self.folder / "hosts.json").write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports()]))
        self._flags = [
            *("--model", str(work / "model"), "--data", str(work / "data"), "--adapter-path", str(self.folder)),
            *("--num-layers", "-1", "--max-seq-length", "64", "--learning-rate", "1e-3", "--val-batches", "1"),
            *("--steps-per-eval", "50", "--steps-per-report", "1", "--iters", str(iters), "--timeout", "20"),
            *("--resume", "auto", "--checkpoint-every", str(every)),
        ]
        self._processes = list[subprocess.Popen[bytes]]()

    def start(self) -> None:
        """Start every rank; the same command each time."""
        self._processes = [self._start_rank(rank) for rank in range(RANKS)]

    def _start_rank(self, rank: int) -> subprocess.Popen[bytes]:
        ring = {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(self.folder / "hosts.json")}
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "MLX_DISABLE_COMPILE": "1", **ring}
        command = [sys.executable, "-m", "pptrain", "train", *self._flags]
        command += ["--checkpoint-dir", str(self.folder / f"disk{rank}")]
        with (self.folder / f"rank{rank}.log").open("ab") as log:
            return subprocess.Popen(command, cwd=ROOT, env=variables, stdout=log, stderr=log)

    def wait(self, seconds: float = 120) -> list[int]:
        """Wait for every rank's end, each for so long; returns the exit codes."""
        return [process.wait(seconds) for process in self._processes]

    def finish(self) -> None:
        """Wait until everything is trained, however busy this machine is."""
        if self.wait(3600) != [0] * RANKS:
            raise SystemExit(self.said())

    def end(self) -> None:
        """Leave no process behind."""
        for process in self._processes:
            process.kill()
            process.wait()

    def kill(self, rank: int) -> None:
        """End one rank as a power cut would."""
        self._processes[rank].kill()

    def is_running(self) -> bool:
        """Whether all ranks are there."""
        return all(process.poll() is None for process in self._processes)

    def reports(self) -> list[dict[str, Any]]:
        """The whole lines of `metrics.jsonl`."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def iteration(self) -> int:
        """The last one that was reported."""
        return max((report["iteration"] for report in self.reports() if "train_loss" in report), default=0)

    def newest(self) -> int:
        """The iteration of the newest checkpoint of which every rank has its own part."""
        each = [{path.parent.name for path in self.folder.glob(f"disk{r}/*/rank{r}.json")} for r in range(RANKS)]
        return max((int(name[:7]) for name in set[str].intersection(*each)), default=0)

    def said(self) -> str:
        """What every rank has printed."""
        return "\n".join((self.folder / f"rank{rank}.log").read_text() for rank in range(RANKS))


def kill_and_go_on(training: Training, kills: int, draw: random.Random) -> list[tuple[object, ...]]:
    """Kill, and start again, as often as was asked; then let the run come to its end."""
    rows = list[tuple[object, ...]]()
    for kill in range(kills):
        ahead = max(1, round(2 * (training.iters - training.newest()) / (kills - kill + 1)))
        target, rank = training.newest() + draw.randint(0, ahead), draw.randrange(RANKS)
        training.start()
        started = time.monotonic()
        while training.iteration() < min(target, training.iters - 1) or time.monotonic() - started < draw.random():
            if not training.is_running():
                raise SystemExit(f"a rank ended by itself:\n{training.said()}")
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.2))
        at = training.iteration()
        training.kill(rank)
        killed_at = time.monotonic()
        codes = training.wait()
        rows.append((kill + 1, rank, at, training.newest(), f"{time.monotonic() - killed_at:.1f}", codes))
    training.start()
    training.finish()
    return rows


def show(rows: Sequence[tuple[object, ...]]) -> None:
    """The table of kills."""
    print("| kill | rank | after iteration | goes on from | s until all had ended | exit codes |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print("| " + " | ".join(map(str, row)) + " |")


def compare(killed: Training, unbroken: Training) -> int:
    """Compare adapters and losses; returns the exit code."""
    ours, theirs = ((run.folder / "adapters.safetensors").read_bytes() for run in (killed, unbroken))
    losses = [
        [(r["iteration"], r["train_loss"]) for r in run.reports() if "train_loss" in r] for run in (killed, unbroken)
    ]
    print(f"\nFinal adapters bit-equal to the unbroken run's: {ours == theirs}")
    print(f"{len(losses[1])} losses, each reported once and equal: {losses[0] == losses[1]}")
    return 0 if ours == theirs and losses[0] == losses[1] else 1


def free_ports() -> list[int]:
    """Ports that nobody listened on a moment ago, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(RANKS)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


if __name__ == "__main__":
    main()
