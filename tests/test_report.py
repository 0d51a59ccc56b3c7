import io
import json
import os
import pty
import termios

import mlx.core as mx
import pytest
from mlx_lm.tuner.callbacks import TrainingCallback

from pptrain.report import Console, Metrics

TRAIN = {
    "iteration": 20,
    "train_loss": 2.25,
    "learning_rate": 1e-3,
    "iterations_per_second": 4.0,
    "tokens_per_second": 1234.4,
    "trained_tokens": 9000,
    "peak_memory": 0.5,
    "grad_norm": 0.125,
    "peak_memory_by_rank": [0.5, 0.25, 0.125],
}
VALID = {"iteration": 24, "val_loss": 1.5, "val_time": 0.25}


def test_metrics_has_one_json_object_a_report_with_every_value(tmp_path):
    metrics = Metrics(tmp_path / "adapters" / "metrics.jsonl")
    metrics.on_train_loss_report(TRAIN)
    metrics.on_val_loss_report(VALID)
    lines = (tmp_path / "adapters" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [TRAIN, VALID]


def test_metrics_writes_arrays_and_numbers_that_are_not_finite_as_json(tmp_path):
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.on_val_loss_report({"iteration": 1, "val_loss": float("nan"), "val_time": mx.array(0.5)})
    metrics.on_train_loss_report({"peak_memory_by_rank": (mx.array(0.25), float("inf"))})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"iteration": 1, "val_loss": None, "val_time": 0.5}, {"peak_memory_by_rank": [0.25, None]}]


def test_metrics_of_an_earlier_run_are_replaced(tmp_path):
    for iteration in (1, 2):
        Metrics(tmp_path / "metrics.jsonl").on_val_loss_report(VALID | {"iteration": iteration})
    assert [json.loads(line)["iteration"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [2]


def test_where_the_output_is_no_terminal_only_plain_lines_are_printed():
    out = io.StringIO()
    with Console(50, out) as console:
        console.on_val_loss_report(VALID)
        for iteration in range(1, 21):
            console.advance(iteration)
        console.on_train_loss_report(TRAIN)
    assert out.getvalue().splitlines() == [
        "iteration    24   val   loss 1.500   in 0.2 s",
        "iteration    20   train loss 2.250   lr 1.00e-03   tokens/s 1,234   grad norm 0.125   "
        "peak memory 0.500 + 0.250 + 0.125 GB",
    ]


def test_on_a_terminal_a_bar_shows_progress_rate_and_time_left():
    reader, writer = pty.openpty()
    termios.tcsetwinsize(writer, (24, 120))
    with os.fdopen(writer, "w") as terminal, Console(50, terminal) as console:
        console.advance(25)
        console.on_train_loss_report(TRAIN)
    shown = os.read(reader, 100_000).decode()
    os.close(reader)
    assert "25/50" in shown
    assert "it/s" in shown or "s/it" in shown
    assert "\rtrain:" in shown
    assert "iteration    20   train loss 2.250" in shown


@pytest.mark.parametrize("kind", [Console, Metrics])
def test_both_are_call_backs_of_mlx_lm(kind):
    assert issubclass(kind, TrainingCallback)
