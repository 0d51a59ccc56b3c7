"""`pptrain report`: a run's page, whether the run has ended, goes on, or was killed in the middle of a line."""

import json
import os
import re
import time

import pytest
from runs import Runs

from pptrain.cli import main
from pptrain.errors import NotationError
from pptrain.job import execute
from pptrain.perfetto import chrome_trace, read_trace
from pptrain.record import read_record
from pptrain.schedule import Action
from pptrain.simulate import Span

TRAIN = {
    "iteration": 1,
    "train_loss": 2.25,
    "learning_rate": 1e-3,
    "tokens_per_second": 1234.4,
    "trained_tokens": 9000,
    "peak_memory": 0.5,
    "grad_norm": 0.125,
    "peak_memory_by_rank": [0.5, 0.25],
}
VALID = {"iteration": 0, "val_loss": 3.5, "val_time": 0.25}


@pytest.fixture
def trained(demo_directory, tmp_path):
    """Directories of runs, by their flags."""
    runs = Runs(demo_directory, tmp_path, "--stages", "2", "--steps-per-report", "1")

    def train(*flags):
        where = ["--trace", str(tmp_path / "trace.json"), "--checkpoint-dir", str(tmp_path / "kept")]
        execute(runs.config("out", *where, *flags), command=["pptrain", "train", *flags])
        return tmp_path / "out"

    return train


def write(directory, *reports, end="\n"):
    directory.mkdir(exist_ok=True)
    (directory / "metrics.jsonl").write_text("\n".join(map(json.dumps, reports)) + end * bool(reports))
    return directory


def page_of(directory, *options):
    assert main(["report", str(directory), *options]) == 0
    return (directory / "report.html").read_text()


def refused(capsys, *argv):
    assert main(["report", *map(str, argv)]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


def charts(page):
    return re.findall(r'<svg class="chart"[^>]*aria-label="([^"]*)"', page)


def test_a_run_that_has_ended_has_its_curves_its_timeline_its_command_and_its_settings(trained, capsys):
    directory = trained("--iters", "3", "--schedule", "gpipe")
    page = page_of(directory)
    assert capsys.readouterr().out.splitlines()[-1] == str(directory / "report.html")
    assert "All 3 iterations are trained." in page
    assert "<pre>pptrain train --iters 3 --schedule gpipe</pre>" in page
    assert charts(page) == ["Loss", "Learning rate", "Gradient norm", "Tokens/s", "Peak memory of each rank, GB"]
    assert re.search(r"gpipe, 2 ranks, [\d.]+ ms, bubble [\d.]+%", page)
    timeline = page.split('<svg class="timeline"')[1]
    for action in ("0F0", "1F1", "1B0", "0B1"):
        assert f"<title>{action}</title>" in timeline
    assert "<td>layers</td><td>3,3</td>" in page
    for report in map(json.loads, (directory / "metrics.jsonl").read_text().splitlines()):
        loss = report.get("train_loss", report.get("val_loss"))
        assert f"{loss:.4f}" in page


def test_the_page_needs_nothing_from_elsewhere(trained):
    page = page_of(trained("--iters", "1"))
    addresses = set(re.findall(r"https?://[^\"' ]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<script|<link|<img|@import|url\(", page)
    assert "prefers-color-scheme: dark" in page


def test_a_pictures_style_is_for_that_picture_alone(trained):
    """A style within a picture counts for the whole page."""
    own = page_of(trained("--iters", "1")).split('<svg class="timeline"')[1].split("<style>")[1].split("</style>")[0]
    selectors = [words.strip() for words in re.findall(r"([^{}]+)\{", own)]
    assert len(selectors) >= 6
    assert [words for words in selectors if not words.startswith((".timeline ", "@media"))] == []


def test_a_run_that_went_on_shows_each_process_and_where_it_began(trained):
    trained("--iters", "2")
    directory = trained("--iters", "4", "--resume")
    trained("--iters", "4", "--resume")  # trains nothing, and so is no part of it
    starts = read_record(directory).starts
    assert [(start.iteration, start.command[2:]) for start in starts] == [
        (0, ("--iters", "2")),
        (2, ("--iters", "4", "--resume")),
    ]
    page = page_of(directory)
    assert "2 processes trained it" in page
    assert page.count('<line class="mark"') == 5
    assert "<title>a process began after iteration 2</title>" in page


def test_a_run_begun_again_forgets_the_one_before(trained, tmp_path):
    directory = trained("--iters", "2")
    (directory / "run.json").write_text("whatever it was")
    trained("--iters", "1", "--checkpoint-dir", str(tmp_path / "other"))
    assert [start.command[2:4] for start in read_record(directory).starts] == [("--iters", "1")]


def test_while_a_run_goes_on_the_half_written_line_is_left_out_and_said(trained):
    directory = trained("--iters", "2")
    record = json.loads((directory / "run.json").read_text())
    (directory / "run.json").write_text(json.dumps({**record, "iters": 90}))
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 3, "train_lo')
    page = page_of(directory)
    assert "2 of 90 iterations are reported; the run goes on, or was stopped." in page
    assert "The last line is being written" in page


def test_what_is_not_there_yet_is_said(tmp_path):
    page = page_of(write(tmp_path / "run"))
    assert "Nothing has been reported yet." in page
    assert "There is nothing to draw yet." in page
    assert "has no run.json" in page
    assert "No trace: <code>pptrain train --trace FILE</code> writes one" in page
    page = page_of(write(tmp_path / "run", TRAIN))
    assert "No validation has been reported yet." in page
    assert charts(page)[0] == "Loss"


def test_a_trace_that_is_older_than_the_run_is_another_runs(trained, tmp_path):
    directory = trained("--iters", "1")
    assert '<svg class="timeline"' in page_of(directory)
    long_ago = time.time() - 3600
    os.utime(tmp_path / "trace.json", (long_ago, long_ago))
    page = page_of(directory)
    assert '<svg class="timeline"' not in page
    assert f"No trace yet: {tmp_path / 'trace.json'} is written when the run has ended." in page
    assert '<svg class="timeline"' in page_of(directory, "--trace", str(tmp_path / "trace.json"))


def test_losses_that_are_not_finite_are_counted(tmp_path):
    reports = [{**TRAIN, "iteration": i, "train_loss": None if i == 2 else 2.0} for i in range(1, 5)]
    page = page_of(write(tmp_path / "run", VALID, *reports))
    assert "Reports without a finite loss, which are gaps in the curve: 1." in page


def test_words_of_a_run_are_escaped(tmp_path):
    directory = write(tmp_path / "run", TRAIN)
    start = {"time": "2026-01-01T00:00:00+00:00", "iteration": 0, "command": ["pptrain", "<script>alert(1)</script>"]}
    record = {
        "model": "<b>",
        "iters": 3,
        "num_ranks": 2,
        "transport": "ring",
        "trace": "<i>",
        "settings": {"<u>": "<u>"},
    }
    (directory / "run.json").write_text(json.dumps({**record, "starts": [start]}))
    page = page_of(directory)
    assert not re.search(r"<script|<b>|<i>|<u>", page)


def test_the_page_can_be_written_elsewhere(tmp_path):
    directory = write(tmp_path / "run", TRAIN)
    assert main(["report", str(directory), "--html", str(tmp_path / "new" / "page.html")]) == 0
    assert "Training run" in (tmp_path / "new" / "page.html").read_text()
    assert not (directory / "report.html").exists()


# -- mistakes ----------------------------------------------------------------------------------------------------------


def test_a_directory_that_is_no_runs_is_named(tmp_path, capsys):
    error = refused(capsys, tmp_path / "none")
    assert f"Cannot read {tmp_path / 'none' / 'metrics.jsonl'}" in error
    assert "--adapter-path" in error


@pytest.mark.parametrize("line", ["{", "[1]", '{"train_loss": 1.0}', '{"iteration": "3"}'])
def test_a_line_that_is_no_report_is_named(line, tmp_path, capsys):
    directory = write(tmp_path / "run", TRAIN)
    (directory / "metrics.jsonl").write_text(json.dumps(TRAIN) + f"\n{line}\n" + json.dumps(TRAIN) + "\n")
    assert f"[{directory / 'metrics.jsonl'}:2] This is no" in refused(capsys, directory)


@pytest.mark.parametrize("text", ["{", "[]", '{"model": "m"}', '{"starts": [{"time": "noon"}]}'])
def test_a_run_json_that_is_none_is_named(text, tmp_path, capsys):
    directory = write(tmp_path / "run", TRAIN)
    (directory / "run.json").write_text(text)
    assert f"[{directory / 'run.json'}] Cannot be read" in refused(capsys, directory)


@pytest.mark.parametrize("text", ["{", "[]", '{"traceEvents": [{"ph": "X"}]}'])
def test_a_trace_that_is_none_is_named(text, tmp_path, capsys):
    path = tmp_path / "trace.json"
    path.write_text(text)
    error = refused(capsys, write(tmp_path / "run", TRAIN), "--trace", path)
    assert "This is no trace of pptrain's" in error
    assert str(path) in error
    assert "Cannot be read" in refused(capsys, tmp_path / "run", "--trace", tmp_path / "none.json")


def test_a_place_where_nothing_can_be_written_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    error = refused(capsys, write(tmp_path / "run", TRAIN), "--html", tmp_path / "file" / "page.html")
    assert "Cannot be written" in error


# -- the trace, there and back -----------------------------------------------------------------------------------------


def test_a_trace_is_read_as_it_was_written():
    spans = {0: [Span(Action(0, "F", 0), 0.0, 0.5), Span(Action(2, "I", 1), 0.75, 1.0)], 1: [], 2: []}
    spans[2] = [Span(Action(1, "B", 3), 0.25, 0.375), Span(Action(1, "W", 3), 0.5, 0.625)]
    assert read_trace(chrome_trace(spans)) == spans


def test_another_programs_trace_is_refused():
    with pytest.raises(NotationError, match="--trace"):
        read_trace('{"traceEvents": [{"ph": "X", "tid": 0, "name": "a", "ts": 1, "dur": 2}]}')
