"""`pptrain launch`: starts `mlx.launch`, and ends as the run did.

`mlx.launch` ends with 0 whatever became of its ranks, and mixes what they say. Here the exit code is that of the rank
that failed first, and its report comes first.

A Ctrl-C, or SIGTERM, comes to each rank once, and never to `mlx.launch`, which would stop to pass on what they say::

    terminal ── SIGINT ──> pptrain launch ─┬─ SIGINT ──────────────> ranks on this machine
                                           └─ a typed Ctrl-C ─ ssh ─> the terminals of ranks on others
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
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from pptrain.errors import ConfigError
from transports.errors import REPORT_LINE

_EXITED = re.compile(r"Node with rank (\d+) exited with code (-?\d+)")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_CTRL_C = "\x03"
"""A terminal makes a SIGINT of it. `mlx.launch` passes on what is typed, and has terminals at the other ends of ssh."""
_SSH = "ssh"
"""One end of a connection, which has to last; the rank is at the other."""
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
        """The rank that failed first: one that did not end because of another, as far as there is one.

        After the first failure `mlx.launch` ends the others by SIGTERM.
        """
        causes = [rank for rank, code in self.codes.items() if code not in (3, 4, -signal.SIGTERM)]
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
    with _caught_signals() as caught:
        _wait(started, outcome, caught)
    reader.join(timeout=2)
    if outcome.codes:
        print(outcome.summary(), file=sys.stderr, flush=True)
    return outcome.exit_code or (130 if len(caught) > 1 else started.returncode)


@contextmanager
def _caught_signals() -> Generator[list[int]]:
    """The signals that ask for an end, as they come."""
    caught = list[int]()
    before = {each: signal.signal(each, lambda number, _: caught.append(number)) for each in _SIGNALS}
    try:
        yield caught
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


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


def _wait(started: subprocess.Popen[str], outcome: Outcome, caught: Sequence[int]) -> None:
    """Until it has ended; some time after a failure, or a second signal, it and all that it started here are ended."""
    passed_on = 0
    while started.poll() is None:
        if len(caught) > passed_on:
            passed_on += 1
            _interrupt(started)
            if passed_on > 1:
                outcome.failed_at = outcome.failed_at or time.monotonic()
        if outcome.failed_at is not None and time.monotonic() - outcome.failed_at > _PATIENCE_SECONDS:
            os.killpg(started.pid, signal.SIGKILL)
        time.sleep(0.1)


def _interrupt(started: subprocess.Popen[str]) -> None:
    """Interrupt every rank, once; where there is none yet, whoever was going to start them."""
    assert started.stdin is not None
    family = list(_descendants(started.pid))
    with suppress(BrokenPipeError):
        started.stdin.write(_CTRL_C)
        started.stdin.flush()
    for process, name in family or [(started.pid, "mlx.launch")]:
        if name != _SSH:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGINT)


def _descendants(process: int) -> Iterator[tuple[int, str]]:
    """All that a process has started on this machine, and the names of these programs; not what connections need."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,comm="], capture_output=True, text=True, check=True).stdout
    for pid, parent, name in (line.split(None, 2) for line in listed.splitlines()):
        if int(parent) == process:
            program = Path(name.strip()).name
            yield int(pid), program
            yield from _descendants(int(pid)) if program != _SSH else ()
