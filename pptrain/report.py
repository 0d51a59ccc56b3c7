"""What a run shows and keeps of itself: lines and a progress bar on the terminal, and `metrics.jsonl`.

Both are mlx-lm call-backs, so they stand in one list with its own for wandb and swanlab. Only the first rank has them.
"""

import json
import logging
import math
import os
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from mlx_lm.tuner.callbacks import TrainingCallback
from tqdm import tqdm

from pptrain.durable import write_whole

_log = logging.getLogger(__name__)


class Metrics(TrainingCallback):
    """Writes one JSON object a report, under mlx-lm's names; a file of an earlier run is replaced.

    Args:
        path: The file.
        done: Iterations after which the run goes on: what an earlier process reported of them is kept, and of later
            ones not, since they come once more.
    """

    def __init__(self, path: Path, done: int = 0) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = _reports_until(done, path) if done and path.exists() else []
        write_whole(path, lambda file: file.write("".join(kept).encode()))

    def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
        """Add a report of training."""
        self._add(train_info)

    def on_val_loss_report(self, val_info: dict[str, Any]) -> None:
        """Add a report of validation."""
        self._add(val_info)

    def _add(self, info: dict[str, Any]) -> None:
        line = json.dumps({name: _plain(value) for name, value in info.items()}, allow_nan=False) + "\n"
        size = self._path.stat().st_size
        try:
            with self._path.open("a") as file:  # closed each time, so that a killed run leaves what it had reported
                file.write(line)
        except OSError as error:  # a full disk is no reason to end a run
            os.truncate(self._path, size)
            _log.warning("[metrics] Cannot write to %s: %s. This report is not in it.", self._path, error.strerror)


def _reports_until(done: int, path: Path) -> list[str]:
    """The lines of a file that are whole and of iterations that are done; a validation comes before its iteration."""
    kept = list[str]()
    for line in path.read_text(errors="replace").splitlines(keepends=True):
        with suppress(ValueError, KeyError, TypeError):
            report = json.loads(line)
            if report["iteration"] + ("val_loss" in report) <= done and line.endswith("\n"):
                kept.append(line)
    return kept


def _plain(value: Any) -> Any:
    """A value as JSON has it: no arrays, and null for what is not finite."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Console(TrainingCallback):
    """Prints one line a report, above a progress bar with rate and time left where the output is a terminal."""

    def __init__(self, num_iterations: int, file: TextIO | None = None, initial: int = 0) -> None:
        self._file = sys.stdout if file is None else file
        self._bar = tqdm(
            total=num_iterations,
            initial=initial,
            desc="train",
            file=self._file,
            disable=not self._file.isatty(),
            dynamic_ncols=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.close()

    def advance(self, iteration: int) -> None:
        """Move the bar to an iteration that is done."""
        self._bar.update(iteration - self._bar.n)

    def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
        """Print a report of training."""
        peaks = " + ".join(f"{peak:.3f}" for peak in train_info["peak_memory_by_rank"])
        self._print(
            train_info["iteration"],
            f"train loss {train_info['train_loss']:.3f}",
            f"lr {train_info['learning_rate']:.2e}",
            f"tokens/s {train_info['tokens_per_second']:,.0f}",
            f"grad norm {train_info['grad_norm']:.3g}",
            f"peak memory {peaks} GB",
        )

    def on_val_loss_report(self, val_info: dict[str, Any]) -> None:
        """Print a report of validation."""
        self._print(val_info["iteration"], f"val   loss {val_info['val_loss']:.3f}", f"in {val_info['val_time']:.1f} s")

    def _print(self, iteration: int, *parts: str) -> None:
        self._bar.clear()
        print(f"iteration {iteration:>5}", *parts, sep="   ", file=self._file, flush=True)
        self._bar.refresh()
