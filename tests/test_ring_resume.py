"""Over real processes: a run that is stopped by a signal, or killed, goes on by the same command to the same bits."""

import json
import shutil
import signal
import subprocess
import sys
import time

import mlx.core as mx
import pytest
from processes import ROOT, ring_environment, write_hostfile
from runs import Runs
from tiny import assert_bit_equal

pytestmark = pytest.mark.ring


class Group:
    """The ranks of a run, each a process with a checkpoint directory of its own."""

    def __init__(self, runs, out, world_size, *flags):
        self.folder = runs.directory / out
        self.folder.mkdir(exist_ok=True)
        hostfile = write_hostfile(self.folder / "hosts.json", world_size)
        self.processes = [self._start(runs, rank, hostfile, flags) for rank in range(world_size)]

    def _start(self, runs, rank, hostfile, flags):
        where = ["--adapter-path", str(self.folder), "--checkpoint-dir", str(self.folder / f"disk{rank}")]
        command = [sys.executable, "-m", "pptrain", "train", *runs.flags, *where, "--resume", "auto", *flags]
        environment = {"PATH": "/usr/bin:/bin", "MLX_DISABLE_COMPILE": "1", "PYTHONPATH": str(ROOT)}
        with (self.folder / f"rank{rank}.out").open("wb") as out:
            return subprocess.Popen(
                command, cwd=ROOT, env={**environment, **ring_environment(rank, hostfile)}, stdout=out, stderr=out
            )

    def wait_for_checkpoint(self):
        """Until a checkpoint of this process's own shows that all ranks train; returns nothing."""
        deadline = time.monotonic() + 90
        there = set(self.checkpoints(0))
        while not set(self.checkpoints(0)) - there:
            assert time.monotonic() < deadline, self.said()
            assert all(process.poll() is None for process in self.processes), self.said()
            time.sleep(0.01)

    def checkpoints(self, rank):
        return sorted(path.parent.name for path in (self.folder / f"disk{rank}").glob("*/*.json"))

    def ended(self, seconds=60):
        deadline = time.monotonic() + seconds
        try:
            return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"a rank did not end within {seconds} s\n{self.said()}") from None
        finally:
            self.end()

    def said(self, rank=None):
        if rank is not None:
            return (self.folder / f"rank{rank}.out").read_text()
        return "\n".join(f"--- rank {r}\n{self.said(r)}" for r in range(len(self.processes)))

    def end(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.fixture
def runs(demo_directory, tmp_path):
    return Runs(demo_directory, tmp_path, "--val-batches", "0", "--timeout", "20", "--steps-per-report", "1")


@pytest.fixture
def start(runs):
    groups = []

    def started(out, world_size, *flags):
        groups.append(Group(runs, out, world_size, *flags))
        return groups[-1]

    yield started
    for group in groups:
        group.end()


def adapters(group):
    return dict(sorted(mx.load(str(group.folder / "adapters.safetensors")).items()))


def reported(group):
    lines = (group.folder / "metrics.jsonl").read_text().splitlines()
    return [(report["iteration"], report["train_loss"]) for report in map(json.loads, lines)]


def finish(runs, start, out, world_size, iters, *flags):
    """The end of a run of which an earlier process trained a part, and that of one that was never stopped."""
    group = start(out, world_size, "--iters", str(iters), *flags)
    assert group.ended(120) == [0] * world_size, group.said()
    expected = runs.run("unbroken", "--iters", str(iters))
    assert_bit_equal(
        adapters(group), dict(sorted(mx.load(str(runs.directory / "unbroken/adapters.safetensors")).items()))
    )
    assert reported(group) == list(enumerate(expected.losses, 1))


@pytest.mark.parametrize(("number", "rank"), [(signal.SIGINT, 0), (signal.SIGTERM, 1), (signal.SIGINT, 2)])
def test_a_signal_to_any_rank_ends_all_with_a_checkpoint_and_code_0(number, rank, runs, start):
    group = start("run", 3, "--iters", "100000", "--checkpoint-every", "2")
    group.wait_for_checkpoint()
    group.processes[rank].send_signal(number)
    assert group.ended() == [0, 0, 0], group.said()
    newest = {group.checkpoints(r)[-1] for r in range(3)}
    assert len(newest) == 1, newest
    iteration = int(newest.pop()[:7])
    assert f"Stopped after iteration {iteration} of 100000" in group.said(0)
    assert "--resume auto" in group.said(0)
    assert f"{signal.Signals(number).name}: stopping after this step" in group.said(rank)
    finish(runs, start, "run", 3, iteration + 3, "--checkpoint-every", "2", "--schedule", "gpipe")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_stops_a_rank_at_once_even_in_a_wait(number, start):
    group = start("run", 3, "--iters", "100000", "--checkpoint-every", "2", "--timeout", "60")
    group.wait_for_checkpoint()
    group.processes[2].send_signal(signal.SIGSTOP)
    time.sleep(1)  # by now the others wait for it
    group.processes[0].send_signal(number)
    time.sleep(0.5)
    assert group.processes[0].poll() is None, group.said()
    group.processes[0].send_signal(number)
    assert group.processes[0].wait(3) == 130, group.said()
    assert group.processes[1].wait(6) == 3, group.said()
    assert "rank 0 was interrupted" in group.said(1)


@pytest.mark.parametrize("more", [(), ("--gather",)])
def test_numbers_that_are_not_finite_end_every_rank_alike_with_a_checkpoint_of_before(more, runs, start):
    """None ends because of another: all have seen the same numbers."""
    wild = ("--learning-rate", "1e30", "--optimizer", "sgd", "--checkpoint-every", "100", "--iters", "6", *more)
    group = start("run", 3, *wild)
    assert group.ended(120) == [1, 1, 1], group.said()
    for rank in range(3):
        said = group.said(rank)
        assert "It was iteration 2, of the rows " in said
        assert said.count("train.jsonl:") == 4
        assert f"The checkpoint of before is {group.folder / f'disk{rank}' / '0000001-of-3'}" in said
        assert "Traceback" not in said
        assert group.checkpoints(rank) == ["0000001-of-3"] * (3 if more and rank == 0 else 1)
    again = start("run", 3, *wild, "--on-nonfinite", "skip")
    assert again.ended(120) == [0, 0, 0], again.said()
    assert [loss for _, loss in reported(again)][1:] == [None] * 5


def test_a_killed_run_goes_on_by_the_same_command_to_the_unbroken_runs_bits(runs, start):
    flags = ("--checkpoint-every", "2")
    for killed in (2, 0, 1):
        group = start("run", 3, "--iters", "100000", *flags)
        group.wait_for_checkpoint()
        group.processes[killed].kill()
        codes = group.ended()
        assert codes[killed] == -9
        assert [code for rank, code in enumerate(codes) if rank != killed] == [3, 3], group.said()
    last = max(int(name[:7]) for rank in range(3) for name in group.checkpoints(rank))
    finish(runs, start, "run", 3, last + 3, *flags)


def test_a_rank_that_lacks_the_files_of_its_new_layers_says_so_and_goes_on_with_a_copy_of_the_gathered_ones(
    runs, start
):
    first = start("run", 2, "--iters", "4", "--checkpoint-every", "2", "--gather")
    assert first.ended(120) == [0, 0], first.said()
    for name in first.checkpoints(0):
        held = sorted(path.name for path in (first.folder / "disk0" / name).glob("*.json"))
        assert held == ["rank0.json", "rank1.json"]
    lacking = start("run", 3, "--iters", "6", "--checkpoint-every", "2", "--gather")
    assert lacking.ended(120) == [2, 2, 2]
    for rank in range(3):
        assert "rank 2: " in lacking.said(rank), lacking.said()
        assert "0000004-of-2 lacks rank0.json, rank1.json here" in lacking.said(rank), lacking.said()
        assert "Traceback" not in lacking.said(rank)
    for rank in (1, 2):
        shutil.copytree(first.folder / "disk0", first.folder / f"disk{rank}", dirs_exist_ok=True)
    finish(runs, start, "run", 3, 6, "--checkpoint-every", "2", "--gather")
