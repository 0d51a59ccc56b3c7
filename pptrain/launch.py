"""`pptrain launch`: starts `mlx.launch`, and ends as the run did.

`mlx.launch` ends with 0 whatever became of its ranks, and mixes what they say. Here the exit code is that of the rank
that failed first, and its report comes first.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from pptrain.errors import ConfigError
from transports.errors import REPORT_LINE

_EXITED = re.compile(r"Node with rank (\d+) exited with code (-?\d+)")
_PATIENCE_SECONDS = 15.0
"""How long the other ranks may take to end after the first failure; a stopped one never does."""


@dataclass(slots=True)
class Outcome:
    """What is known about how the ranks ended, in the order in which it became known."""

    codes: dict[int, int] = field(default_factory=dict[int, int])
    reports: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    failed_at: float | None = None

    def read(self, line: str) -> bool:
        """Take in a line of standard error; returns whether it is part of a report, to be shown at the end."""
        if report := REPORT_LINE.match(line):
            rank, code, text = int(report[1]), int(report[2]), report[3]
            self.codes.setdefault(rank, code)
            self.reports.setdefault(rank, []).append(text)
        elif (exited := _EXITED.search(line)) and int(exited[2]):
            self.codes.setdefault(int(exited[1]), int(exited[2]))
        if self.codes and self.failed_at is None:
            self.failed_at = time.monotonic()
        return report is not None

    @property
    def first(self) -> int | None:
        """The rank that failed first: one that was not lost or silent to another, as far as there is one."""
        causes = [rank for rank, code in self.codes.items() if code not in (3, 4)]
        return next(iter([*causes, *self.codes]), None)

    @property
    def exit_code(self) -> int:
        """Of the rank that failed first; as a shell says it where a signal ended it."""
        if self.first is None:
            return 0
        code = self.codes[self.first]
        return 128 - code if code < 0 else code

    def summary(self) -> str:
        """The reports, the first failure's first."""
        ranks = sorted(self.codes, key=lambda rank: rank != self.first)
        lines = list[str]()
        for rank in ranks:
            lines.append(f"rank {rank} ended with code {self.codes[rank]}" + (", first" if rank == self.first else ""))
            lines += [f"  {line}" for line in self.reports.get(rank, [])]
        return "\n".join(lines)


def run(argv: Sequence[str]) -> int:
    """Launch a command on all hosts; the arguments are `mlx.launch`'s.

    Returns:
        0, or the exit code of the first rank that failed.

    Raises:
        ConfigError: If there is no `mlx.launch`.
    """
    started = subprocess.Popen(
        [_program(), *argv], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    outcome = Outcome()
    reader = threading.Thread(target=_read, args=(started.stderr, outcome), daemon=True)
    reader.start()
    try:
        _wait(started, outcome)
    except KeyboardInterrupt:
        os.killpg(started.pid, signal.SIGINT)
        _wait(started, Outcome(failed_at=time.monotonic()))
        outcome.codes.setdefault(-1, 130)
        return 130
    reader.join(timeout=2)
    if outcome.codes:
        print(outcome.summary(), file=sys.stderr, flush=True)
    return outcome.exit_code or started.returncode


def _program() -> str:
    beside = Path(sys.executable).with_name("mlx.launch")
    found = str(beside) if beside.exists() else shutil.which("mlx.launch")
    if not found:
        raise ConfigError("[launch] There is no mlx.launch. Expected it beside this Python. Install mlx again.")
    return found


def _read(stream: IO[str] | None, outcome: Outcome) -> None:
    assert stream is not None
    for line in stream:
        if not outcome.read(line.rstrip("\n")):
            sys.stderr.write(line)
            sys.stderr.flush()


def _wait(started: subprocess.Popen[str], outcome: Outcome) -> None:
    """Until it has ended; some time after a failure it and all that it started here are ended."""
    while started.poll() is None:
        if outcome.failed_at is not None and time.monotonic() - outcome.failed_at > _PATIENCE_SECONDS:
            os.killpg(started.pid, signal.SIGKILL)
        time.sleep(0.1)
