"""What becomes of a run over real processes when a rank dies, stops, fails, or is interrupted.

Every survivor ends in time, by the exit code of the cause, naming the rank that failed first.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import pytest
from processes import ROOT, ring_environment, write_hostfile

pytestmark = pytest.mark.ring

TIMEOUT_SECONDS = 3.0
WORLD_SIZE = 3


class Run:
    """A training run of three ranks that goes on until somebody ends it."""

    def __init__(self, demo: Path, out: Path, *more: str):
        out.mkdir(parents=True)
        self.adapters = out / "adapters"
        hostfile = write_hostfile(out / "hosts.json", WORLD_SIZE)
        where = ["--model", str(demo / "model"), "--data", str(demo / "data"), "--adapter-path", str(self.adapters)]
        run = ["--num-layers", "-1", "--iters", "100000", "--steps-per-report", "1", "--val-batches", "0"]
        rest = ["--max-seq-length", "64", "--save-every", "5", "--timeout", str(TIMEOUT_SECONDS)]
        command = [sys.executable, "-m", "pptrain", "train", *where, *run, *rest, *more]
        self.errors = [out / f"rank{rank}.err" for rank in range(WORLD_SIZE)]
        self.processes = []
        for rank in range(WORLD_SIZE):
            environment = {**os.environ, "MLX_DISABLE_COMPILE": "1", **ring_environment(rank, hostfile)}
            with self.errors[rank].open("wb") as errors:
                self.processes.append(
                    subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=errors)
                )

    def wait_for_steps(self):
        """Until the first saved adapters show that all ranks train."""
        deadline = time.monotonic() + 60
        while not (self.adapters / "adapters.safetensors").exists():
            assert time.monotonic() < deadline, self.said()
            assert all(process.poll() is None for process in self.processes), self.said()
            time.sleep(0.02)

    def ended(self, ranks, seconds):
        """Exit codes of some ranks, which have to end in time."""
        deadline = time.monotonic() + seconds
        codes = []
        for rank in ranks:
            try:
                codes.append(self.processes[rank].wait(max(0.0, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"rank {rank} did not end within {seconds} s\n{self.said()}") from None
        return codes

    def said(self, rank=None):
        if rank is not None:
            return self.errors[rank].read_text()
        return "\n".join(f"--- rank {r}\n{self.said(r)}" for r in range(WORLD_SIZE))

    def end(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.fixture
def start(demo_directory, tmp_path):
    runs = []

    def started(name="run", *more):
        runs.append(Run(demo_directory, tmp_path / name, *more))
        runs[-1].wait_for_steps()
        return runs[-1]

    yield started
    for run in runs:
        run.end()


def others(rank):
    return [other for other in range(WORLD_SIZE) if other != rank]


@pytest.mark.parametrize("lost", range(WORLD_SIZE))
def test_a_killed_rank_ends_the_others_with_code_3_and_its_name(lost, start):
    draw = random.Random(lost)
    # A new run takes seconds to start, so each is killed once, at a random moment of a step.
    for attempt in range(7):
        run = start(f"{attempt}")
        time.sleep(draw.uniform(0, 0.3))
        run.processes[lost].kill()
        assert run.ended(others(lost), TIMEOUT_SECONDS + 5) == [3, 3], run.said()
        for rank in others(lost):
            assert f"PeerLost: [rank {rank}] rank {lost} was lost first" in run.said(rank), run.said()
            assert "This rank stood at" in run.said(rank)
            assert "Traceback" not in run.said(rank)
        assert mx.load(str(run.adapters / "adapters.safetensors"))


@pytest.mark.parametrize("silent", range(WORLD_SIZE))
def test_a_stopped_rank_ends_the_others_with_code_4_and_its_name(silent, start):
    run = start()
    run.processes[silent].send_signal(signal.SIGSTOP)
    assert run.ended(others(silent), 2 * TIMEOUT_SECONDS + 5) == [4, 4], run.said()
    for rank in others(silent):
        assert f"TransportTimeout: [rank {rank}] rank {silent} is silent" in run.said(rank), run.said()
        assert "Traceback" not in run.said(rank)


@pytest.mark.parametrize("interrupted", range(WORLD_SIZE))
def test_an_interrupted_rank_ends_at_once_and_tells_the_others(interrupted, start):
    run = start()
    run.processes[interrupted].send_signal(signal.SIGINT)
    assert run.ended([interrupted], 2) == [130], run.said()
    assert run.ended(others(interrupted), TIMEOUT_SECONDS + 5) == [3, 3], run.said()
    for rank in others(interrupted):
        assert f"rank {interrupted} was interrupted" in run.said(rank), run.said()


def test_a_rank_that_is_interrupted_in_a_wait_ends_within_two_seconds(start):
    run = start("waits", "--timeout", "60")
    run.processes[2].send_signal(signal.SIGSTOP)
    time.sleep(1)  # by now the others wait for it
    run.processes[0].send_signal(signal.SIGINT)
    assert run.ended([0], 2) == [130], run.said()
    assert run.ended([1], 5) == [3], run.said()
    assert "rank 0 was interrupted" in run.said(1)


def test_a_rank_that_fails_is_the_cause_that_the_others_name(start):
    """The first rank cannot write its adapters any more."""
    run = start()
    saved = run.adapters / "adapters.safetensors"
    run.adapters.rename(run.adapters.with_name("away"))
    run.adapters.write_text("no directory")
    assert run.ended([0, 1, 2], 30)[1:] == [3, 3], run.said()
    for rank in (1, 2):
        assert "rank 0 failed first: " in run.said(rank), run.said()
    assert saved.parent.is_file()
