"""Whole runs of `pptrain.job` in one process, as the tests of resuming need them."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from tiny import same_bits

from pptrain.config import TrainConfig, parse
from pptrain.durable import At, nothing
from pptrain.job import Done, execute

ROWS = 22
"""With batches of 4 an epoch has 5, so that its order is drawn anew within a run of 12."""


def write_data(demo: Path, directory: Path) -> Path:
    """A part of the demo's rows."""
    directory.mkdir(parents=True)
    for name, count in (("train", ROWS), ("valid", 9), ("test", 9)):
        rows = (demo / "data" / f"{name}.jsonl").read_text().splitlines()[:count]
        (directory / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    return directory


class Runs:
    """Runs that differ by their flags alone."""

    def __init__(self, demo: Path, directory: Path, *flags: str):
        self.directory, self.checkpoints = directory, directory / "checkpoints"
        self.flags = [
            *("--model", str(demo / "model"), "--data", str(write_data(demo, directory / "data"))),
            *("--batch-size", "4", "--microbatches", "2", "--max-seq-length", "64", "--learning-rate", "1e-3"),
            *("--num-layers", "-1", "--steps-per-report", "4", "--steps-per-eval", "5", "--val-batches", "1", *flags),
        ]

    def config(self, out: str, *flags: str) -> TrainConfig:
        return parse([*self.flags, "--adapter-path", str(self.directory / out), *flags])

    def run(self, out: str, *flags: str, at: At = nothing) -> Done:
        return execute(self.config(out, *flags), at)

    def kept(self, out: str, *flags: str) -> Done:
        """A run with checkpoints every 3 iterations."""
        return self.run(out, "--checkpoint-dir", str(self.checkpoints), "--checkpoint-every", "3", *flags)

    def names(self) -> list[str]:
        return sorted(path.name for path in self.checkpoints.iterdir())

    def reports(self, out: str, *names: str) -> list[list[object]]:
        """These values of each line of `metrics.jsonl` that has all of them."""
        lines = (self.directory / out / "metrics.jsonl").read_text().splitlines()
        reports = [json.loads(line) for line in lines]
        return [[report[name] for name in names] for report in reports if all(name in report for name in names)]


def state_of(done: Done) -> dict[str, mx.array]:
    """Everything that training changes, by name."""
    parameters = dict(tree_flatten(done.pipeline.model.trainable_parameters()))
    moments = dict(tree_flatten(done.optimizer.state))
    return {f"parameter {n}": a for n, a in parameters.items()} | {f"moment {n}": a for n, a in moments.items()}


def assert_same_end(found: Done, expected: Done) -> None:
    """Parameters, moments and counters bit for bit, and the losses of the iterations that both trained."""
    mine, theirs = state_of(found), state_of(expected)
    assert mine.keys() == theirs.keys()
    assert [name for name in theirs if not same_bits(mine[name], theirs[name])] == []
    assert found.losses == expected.losses[len(expected.losses) - len(found.losses) :]
    assert found.pipeline.num_steps == expected.pipeline.num_steps
