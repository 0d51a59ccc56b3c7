"""Starts real processes as the ranks of a ring on 127.0.0.1, as `mlx.launch` would, and waits for them to end.

ended = run_ranks([["-m", "pptrain", "train", ...]] * 3, timeout_seconds=60)
assert [rank.returncode for rank in ended] == [0, 0, 0], report(ended)
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Ended:
    """How one rank ended; `returncode` is None if it had to be killed at the timeout."""

    returncode: int | None
    stdout: str
    stderr: str
    seconds: float
    ended_at: float
    """By `time.monotonic`, which all processes of a machine share."""


def run_ranks(
    arguments: Sequence[Sequence[str]],
    *,
    timeout_seconds: float = 60.0,
    environment: Mapping[str, str] | None = None,
    not_waited_for: Collection[int] = (),
) -> list[Ended]:
    """Run `python *arguments[rank]` for each rank of a ring, and kill what is left at the timeout.

    Args:
        arguments: What follows `python`, for each rank.
        timeout_seconds: For all ranks together.
        environment: Variables added to every rank's, after those of the ring; an empty value takes one away.
        not_waited_for: Ranks that are killed when the others have ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        hostfile = write_hostfile(Path(folder) / "hosts.json", len(arguments))
        ranks: list[_Rank] = []
        try:
            for rank, argv in enumerate(arguments):
                variables = {**ring_environment(rank, hostfile), **(environment or {})}
                ranks.append(_Rank(argv, variables, Path(folder) / f"rank{rank}"))
            _wait([each for rank, each in enumerate(ranks) if rank not in not_waited_for], timeout_seconds)
        finally:
            for each in ranks:
                each.kill()
        return [each.ended() for each in ranks]


def ring_environment(rank: int, hostfile: Path) -> dict[str, str]:
    """The variables that `mlx.launch --backend ring` sets."""
    return {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hostfile)}


def write_hostfile(path: Path, world_size: int) -> Path:
    """Write the addresses of a ring of this many ranks on this machine, in the form that MLX reads."""
    path.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(world_size)]))
    return path


def free_ports(count: int) -> list[int]:
    """Ports that nobody listened on a moment ago, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def report(ended: Sequence[Ended]) -> str:
    """Everything that every rank said, for the message of a failed assertion."""
    parts = [
        f"--- rank {rank}: returncode {each.returncode} after {each.seconds:.1f} s\n{each.stdout}{each.stderr}"
        for rank, each in enumerate(ended)
    ]
    return "\n".join(parts)


def _wait(ranks: Sequence[_Rank], timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not all([rank.has_ended() for rank in ranks]) and time.monotonic() < deadline:
        time.sleep(0.01)


class _Rank:
    """One process; its output goes to files, since a full pipe would stop it."""

    def __init__(self, argv: Sequence[str], variables: Mapping[str, str], output: Path) -> None:
        self._out, self._err = output.with_suffix(".out"), output.with_suffix(".err")
        self._started = time.monotonic()
        self._seconds = 0.0
        self._returncode: int | None = None
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = subprocess.Popen(
                [sys.executable, *argv], cwd=ROOT, env=_environment(variables), stdout=out, stderr=err
            )

    def has_ended(self) -> bool:
        if self._returncode is None and (returncode := self._process.poll()) is not None:
            self._returncode, self._seconds = returncode, time.monotonic() - self._started
        return self._returncode is not None

    def kill(self) -> None:
        if not self.has_ended():
            self._seconds = time.monotonic() - self._started
            self._process.kill()
            self._process.wait()

    def ended(self) -> Ended:
        ended_at = self._started + self._seconds
        return Ended(self._returncode, self._out.read_text(), self._err.read_text(), self._seconds, ended_at)


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MLX_")}
    defaults = {"MLX_DISABLE_COMPILE": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    merged = {**inherited, **defaults, **variables}
    return {name: value for name, value in merged.items() if value}
