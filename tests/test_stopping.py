"""The first signal asks, the second ends."""

import math
import signal
import threading

import pytest
from runs import Runs, assert_same_end

from pptrain.stopping import asked_by_signals
from transports import LoopbackWorld

SIGNALS = [signal.SIGINT, signal.SIGTERM]


class Asked:
    def __init__(self):
        self.times = 0

    def __call__(self):
        self.times += 1


@pytest.mark.parametrize("second", SIGNALS)
@pytest.mark.parametrize("first", SIGNALS)
def test_the_first_signal_asks_and_the_second_interrupts(first, second, capfd):
    ask, before = Asked(), [signal.getsignal(each) for each in SIGNALS]
    with asked_by_signals(LoopbackWorld(1), ask):
        signal.raise_signal(first)
        assert ask.times == 1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(second)
    assert ask.times == 1
    assert [signal.getsignal(each) for each in SIGNALS] == before
    assert f"{first.name}: stopping after this step" in capfd.readouterr().err


def test_outside_the_main_thread_signals_are_left_alone():
    found = []

    def look():
        with asked_by_signals(LoopbackWorld(1), Asked()):
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGINT)]


def test_a_run_that_is_asked_ends_after_its_step_with_a_checkpoint_and_says_how_to_go_on(
    demo_directory, tmp_path, capsys
):
    """The signal comes when the first checkpoint is being written, so that the step after it is the last."""
    runs = Runs(demo_directory, tmp_path, "--stages", "2", "--val-batches", "0")
    expected = runs.run("unbroken", "--iters", "6")
    kept = ["--checkpoint-dir", str(runs.checkpoints), "--checkpoint-every", "3", "--iters", "6"]
    done = runs.run("out", *kept, at=Once("committed", lambda: signal.raise_signal(signal.SIGTERM)))
    assert (done.ended, len(done.losses)) == ("asked", 4)
    assert runs.names() == ["0000003-of-2", "0000004-of-2"]
    said = capsys.readouterr().out
    assert f"Stopped after iteration 4 of 6, with a checkpoint in {runs.checkpoints}." in said
    assert "--resume auto" in said
    assert not (tmp_path / "out" / "adapters.safetensors").exists()
    assert_same_end(runs.run("out", *kept, "--resume"), expected)


def test_a_run_is_stopped_after_a_step_that_is_skipped_too(demo_directory, tmp_path):
    runs = Runs(demo_directory, tmp_path, "--learning-rate", "1e30", "--optimizer", "sgd", "--stages", "2")
    kept = ["--checkpoint-dir", str(runs.checkpoints), "--checkpoint-every", "1", "--on-nonfinite", "skip"]
    asked = Once("committed", lambda: signal.raise_signal(signal.SIGTERM))
    done = runs.run("out", "--iters", "6", "--val-batches", "0", *kept, at=asked)
    assert (done.ended, len(done.losses), math.isnan(done.losses[1])) == ("asked", 2, True)
    assert runs.names() == ["0000001-of-2", "0000002-of-2"]


class Once:
    """Does something when a point of writing is come to for the first time."""

    def __init__(self, point, act):
        self.point, self.act, self.is_done = point, act, False

    def __call__(self, point):
        if point == self.point and not self.is_done:
            self.is_done = True
            self.act()
