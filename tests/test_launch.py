"""`pptrain launch` over real ranks: the exit code and the report of the one that failed first."""

import os
import signal
import subprocess
import sys
import time

import pytest
from processes import ROOT, free_ports

from pptrain.launch import Outcome


def read(*said: str) -> tuple[Outcome, list[str]]:
    """What is kept, and what is passed on at once."""
    outcome = Outcome()
    return outcome, [line for line in said if not outcome.read(line)]


def test_no_failure_is_code_0():
    outcome, shown = read("WARNING: anything", "Node with rank 0 exited with code 0")
    assert (outcome.exit_code, outcome.summary(), len(shown)) == (0, "", 2)


def test_the_first_that_failed_by_itself_comes_first_though_another_reported_before():
    outcome, shown = read(
        "[rank 0, exit code 3] PeerLost: rank 2 failed first",
        "[rank 0, exit code 3]   This rank stood at 0F1",
        "[WARN] Node with rank 0 exited with code 3",
        "[rank 2, exit code 2] ConfigError: [data] no rows",
        "[WARN] Node with rank 2 exited with code 2",
        "[WARN] Node with rank 1 was killed",
    )
    assert outcome.exit_code == 2
    assert len(shown) == 3
    assert outcome.summary().splitlines() == [
        "rank 2 ended with code 2, first",
        "  ConfigError: [data] no rows",
        "rank 0 ended with code 3",
        "  PeerLost: rank 2 failed first",
        "    This rank stood at 0F1",
    ]


def test_a_signal_is_told_as_a_shell_tells_it():
    outcome, _ = read("[WARN] Node with rank 1 exited with code -9", "[rank 0, exit code 3] PeerLost: rank 1")
    assert (outcome.first, outcome.exit_code) == (1, 137)


def launch(*command: str, ranks: int = 2, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(launcher(ranks, *command), cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def launcher(ranks: int, *command: str) -> list[str]:
    # A block of ports that were free a moment ago: mlx.launch counts up from the first.
    first = str(min(port for port in free_ports(8)))
    options = ["-n", str(ranks), "--backend", "ring", "--starting-port", first, "--env", "MLX_DISABLE_COMPILE=1"]
    return [sys.executable, "-m", "pptrain", "launch", *options, "--", sys.executable, *command]


@pytest.mark.ring
def test_a_rank_that_exits_3_ends_the_launch_with_3():
    done = launch("-c", "import os, sys; sys.exit(3 if os.environ['MLX_RANK'] == '1' else 0)")
    assert done.returncode == 3, done.stderr
    assert "rank 1 ended with code 3, first" in done.stderr


@pytest.mark.ring
def test_success_is_0_and_what_ranks_print_is_passed_on():
    done = launch("-c", "import os; print('rank', os.environ['MLX_RANK'], 'speaks')")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 speaks", "rank 1 speaks"]


@pytest.mark.ring
def test_a_mistake_in_the_command_is_code_2_with_the_message(demo_directory, tmp_path):
    where = ["--model", str(demo_directory / "model"), "--data", str(demo_directory / "data")]
    done = launch("-m", "pptrain", "train", *where, "--adapter-path", str(tmp_path / "out"), "--stages", "7")
    assert done.returncode == 2, done.stderr
    assert "PartitionError: [stages] Cannot divide 6 layers into 7 stages" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.ring
def test_training_under_the_launcher_ends_with_0_and_leaves_adapters(demo_directory, tmp_path):
    where = ["--model", str(demo_directory / "model"), "--data", str(demo_directory / "data")]
    run = ["--num-layers", "-1", "--iters", "2", "--val-batches", "0", "--adapter-path", str(tmp_path / "out")]
    done = launch("-m", "pptrain", "train", *where, *run)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "adapters.safetensors").exists()


@pytest.mark.ring
def test_interrupting_the_launcher_ends_every_rank():
    started = subprocess.Popen(
        launcher(2, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert started.stdout is not None
    ranks = [int(started.stdout.readline()) for _ in range(2)]
    started.send_signal(signal.SIGINT)
    assert started.wait(20) == 130
    deadline = time.monotonic() + 10
    while any(is_running(rank) for rank in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    started.stdout.close()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
