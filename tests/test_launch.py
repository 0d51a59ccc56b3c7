"""`pptrain launch` over real ranks: the exit code and the report of the one that failed first."""

import fcntl
import json
import os
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import pytest
from processes import ROOT, free_ports

from pptrain.launch import Outcome
from pptrain.store import names_in


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


def test_a_rank_that_the_launcher_ended_is_not_the_first_that_failed():
    outcome, _ = read(
        "[rank 0, exit code 4] TransportTimeout: rank 2 is silent",
        "[WARN] Node with rank 0 exited with code 4",
        "[WARN] Node with rank 1 exited with code -15",
    )
    assert (outcome.first, outcome.exit_code) == (0, 4)


def launch(*command: str, ranks: int = 2, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(launcher(ranks, *command), cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def launcher(ranks: int, *command: str, options: Sequence[str] = ()) -> list[str]:
    # A block of ports that were free a moment ago: mlx.launch counts up from the first.
    first = str(min(port for port in free_ports(8)))
    how = ["--backend", "ring", "--starting-port", first, "--env", "MLX_DISABLE_COMPILE=1"]
    where = options or ["-n", str(ranks)]
    return [sys.executable, "-m", "pptrain", "launch", *where, *how, "--", sys.executable, *command]


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


class Terminal:
    """A program in the foreground of a terminal of its own."""

    def __init__(self, *command):
        self._ours, theirs = os.openpty()
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, preexec_fn=take
        )
        os.close(theirs)
        self._said, self._is_over = bytearray(), False
        self._listens = threading.Thread(target=self._listen)
        self._listens.start()

    def type(self, text):
        os.write(self._ours, text.encode())

    def said(self):
        return self._said.decode(errors="replace")

    def wait(self, seconds):
        try:
            return self.process.wait(seconds)
        finally:
            self.end()

    def end(self):
        self.process.kill()
        self.process.wait()
        self._is_over = True
        self._listens.join()
        os.close(self._ours)

    def _listen(self):
        # On Linux reading fails when nobody has the other end any more, elsewhere it gives nothing.
        with suppress(OSError):
            while not self._is_over or select.select([self._ours], [], [], 0)[0]:
                if select.select([self._ours], [], [], 0.1)[0]:
                    self._said += os.read(self._ours, 4096)


def take():
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def wait_until(is_so, terminal, seconds=60):
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline or terminal.process.poll() is not None:
            terminal.end()
            raise AssertionError(terminal.said())
        time.sleep(0.02)


def training_in_a_terminal(demo_directory, tmp_path, *flags, options=()):
    """A run that goes on until it is stopped."""
    where = ["--model", str(demo_directory / "model"), "--data", str(demo_directory / "data")]
    run = ["--num-layers", "-1", "--iters", "2000", "--adapter-path", str(tmp_path / "out"), *flags]
    kept = ["--checkpoint-dir", str(tmp_path / "kept"), "--checkpoint-every", "3"]
    command = ["-m", "pptrain", "train", *where, *run, *kept]
    return Terminal(*launcher(2, *command, options=options))


def long_training(demo_directory, tmp_path, *options):
    """A run in a terminal that has written its first checkpoint."""
    terminal = training_in_a_terminal(demo_directory, tmp_path, "--val-batches", "0", options=options)
    wait_until(lambda: names_in(tmp_path / "kept"), terminal)
    return terminal


def assert_stopped_with_a_checkpoint(terminal, kept):
    assert terminal.wait(60) == 0, terminal.said()
    said = terminal.said()
    assert said.count("SIGINT: stopping after this step") == 2, said
    [stopped] = re.findall(r"Stopped after iteration (\d+) of 2000, with a checkpoint", said)
    assert max(names_in(kept)).iteration == int(stopped)


@pytest.mark.ring
def test_one_ctrl_c_in_a_terminal_ends_every_rank_with_a_checkpoint_and_code_0(demo_directory, tmp_path):
    terminal = long_training(demo_directory, tmp_path)
    terminal.type("\x03")
    assert_stopped_with_a_checkpoint(terminal, tmp_path / "kept")


SSH = f"""#!{sys.executable}
import os, pty, sys
assert sys.argv[1] == "-tt"
os.environ["PYTHONWARNINGS"] = ""
sys.exit(os.waitstatus_to_exitcode(pty.spawn(["/bin/bash", "-c", sys.argv[-1]])))
"""


@pytest.mark.ring
def test_a_ctrl_c_reaches_ranks_on_other_machines_through_their_terminals(demo_directory, tmp_path, monkeypatch):
    """In place of ssh stands a program that runs a command in a terminal, as `ssh -tt` does."""
    ssh, hosts = tmp_path / "ssh", tmp_path / "hosts.json"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    hosts.write_text(json.dumps([{"ssh": f"mac{rank}", "ips": ["127.0.0.1"]} for rank in range(2)]))
    terminal = long_training(demo_directory, tmp_path, "--hostfile", str(hosts))
    terminal.type("\x03")
    assert_stopped_with_a_checkpoint(terminal, tmp_path / "kept")


@pytest.mark.ring
def test_a_second_ctrl_c_stops_at_once(demo_directory, tmp_path):
    """Within a step so long that the first signal alone would be waited for."""
    long_step = ["--val-batches", "1", "--grad-accumulation-steps", "200"]
    terminal = training_in_a_terminal(demo_directory, tmp_path, *long_step)
    wait_until(lambda: "val   loss" in terminal.said(), terminal)
    terminal.process.send_signal(signal.SIGSTOP)  # so that it finds both when it goes on
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
        terminal.process.send_signal(each)
    assert terminal.wait(20) == 130, terminal.said()
    assert "Stopped after iteration" not in terminal.said()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
