"""What a run's directory tells of it: `run.json`, written at each start, and the reports in `metrics.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pptrain.durable import write_whole
from pptrain.errors import ConfigError

RECORD, METRICS = "run.json", "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class Start:
    """One process that trained a part of a run.

    Attributes:
        time: When it began, UTC, as ISO 8601 has it.
        iteration: After which iteration it went on; 0 for the beginning.
        command: What started it; empty if it was not started from a command line.
    """

    time: str
    iteration: int
    command: tuple[str, ...]

    @staticmethod
    def now(iteration: int, command: Sequence[str]) -> Start:
        """A process that begins now."""
        return Start(datetime.now(UTC).isoformat(timespec="seconds"), iteration, tuple(command))


@dataclass(frozen=True, slots=True)
class Record:
    """What a run was started with.

    Attributes:
        model: Its name or directory.
        iters: Iterations in all.
        num_ranks: Over how many ranks, in its last process.
        transport: What carried their messages.
        trace: Where the last step's trace goes, as an absolute path; None for nowhere.
        settings: What all ranks agreed on, by the flag that sets it.
        starts: Its processes, the oldest first.
    """

    model: str
    iters: int
    num_ranks: int
    transport: str
    trace: str | None
    settings: dict[str, str]
    starts: tuple[Start, ...] = ()


@dataclass(frozen=True, slots=True)
class Reports:
    """The lines of `metrics.jsonl`, in order; `is_cut_off` if the last is being written or was never finished."""

    train: list[dict[str, Any]]
    valid: list[dict[str, Any]]
    is_cut_off: bool = False


def note_start(directory: Path, record: Record, start: Start) -> None:
    """Write down what a run is started with, and after the processes before it, if it goes on, this one."""
    before = read_record(directory) if start.iteration else None
    starts = [each for each in before.starts if each.iteration < start.iteration] if before else []
    text = json.dumps(asdict(replace(record, starts=(*starts, start))), indent=1) + "\n"
    write_whole(directory / RECORD, lambda file: file.write(text.encode()))


def read_record(directory: Path) -> Record | None:
    """What a directory's run was started with; None if it does not say.

    Raises:
        ConfigError: If its `run.json` is none of ours.
    """
    path = directory / RECORD
    if not path.exists():
        return None
    try:
        return _record(json.loads(path.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"[{path}] Cannot be read: {type(error).__name__}: {error}. Expected what pptrain train writes. Remove it, "
            "to do without the command and the settings."
        ) from error


def _record(values: Any) -> Record:
    starts = tuple(_start(each) for each in values["starts"])
    settings = {str(name): str(value) for name, value in dict(values["settings"]).items()}
    trace = None if values["trace"] is None else str(values["trace"])
    numbers = int(values["iters"]), int(values["num_ranks"])
    return Record(str(values["model"]), *numbers, str(values["transport"]), trace, settings, starts)


def _start(values: Any) -> Start:
    datetime.fromisoformat(values["time"])
    return Start(values["time"], int(values["iteration"]), tuple(map(str, values["command"])))


def read_reports(directory: Path) -> Reports:
    """The reports of a run, whether it has ended or not: a last line that is half written is left out.

    Raises:
        ConfigError: If there is no such file, or a line is no report.
    """
    path = directory / METRICS
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise ConfigError(
            f"[report] Cannot read {path}: {error.strerror}. Expected the --adapter-path of a run, which has "
            f"{METRICS}. Check the directory."
        ) from error
    is_cut_off = bool(lines) and not lines[-1].endswith(b"\n")
    whole = [_report(path, number, line) for number, line in enumerate(lines[: len(lines) - is_cut_off], 1)]
    train = [report for report in whole if "train_loss" in report]
    return Reports(train, [report for report in whole if "val_loss" in report], is_cut_off)


def _report(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        report: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(
            f"[{path}:{number}] This is no JSON: {error}. Expected one report a line. Repair it, or remove the line."
        ) from error
    if not isinstance(report, dict) or not isinstance(report.get("iteration"), int | float):
        raise ConfigError(
            f"[{path}:{number}] This is no report: it has no iteration. Expected lines as pptrain train writes them. "
            "Repair it, or remove the line."
        )
    return report
