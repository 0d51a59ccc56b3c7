"""Writing checkpoints: a kill at any point, a disk that is full, parts that come together on the first rank."""

import json
import resource
import subprocess
import sys
from contextlib import contextmanager

import mlx.core as mx
import mlx.optimizers as optim
import pytest
from mlx_lm import load
from processes import ROOT
from runs import Runs, assert_same_end
from tiny import batch, tiny

from pptrain import Pipeline
from pptrain.checkpoint import save_whole_model
from pptrain.cli import main
from pptrain.errors import SaveError
from pptrain.model import find_slots
from pptrain.progress import Progress, mlx_state, numpy_state
from pptrain.report import Metrics
from pptrain.resume import examine
from pptrain.saving import Checkpoints, gather_parts
from pptrain.store import Name, ranks_in, visible_parts
from transports import LoopbackWorld

SETTINGS = {"seed": "0"}


def progress(iteration):
    return Progress(iteration, iteration, 0, iteration, numpy_state(), numpy_state(), mlx_state())


class Trained:
    """A tiny model that trains, and its checkpoints."""

    def __init__(self, directory, num_stages=2, **options):
        self.directory = directory
        self.pipeline, self.optimizer = Pipeline(tiny(4), num_stages), optim.Adam(1e-2)
        self.checkpoints = Checkpoints(directory, 2, SETTINGS, **options)

    def step_and_save(self, iteration):
        self.pipeline.step(self.optimizer, *batch(seed=iteration), 2)
        return self.checkpoints.save(self.pipeline, self.optimizer, progress(iteration))

    def names(self):
        return sorted(path.name for path in self.directory.iterdir())

    def whole(self):
        names = {rank: self.pipeline.updated_by(rank) for rank in self.pipeline.world.local_ranks}
        found = [Name.of(path) for path in sorted(self.directory.iterdir())]
        return [
            str(name)
            for name in found
            if all(examine(self.directory, name, needed, SETTINGS).state == "whole" for needed in names.values())
        ]


# -- kills -------------------------------------------------------------------------------------------------------------

# Where the process is killed, and which iteration the next one goes on from.
POINTS = {
    "arrays begin": 3,
    "arrays writing": 3,
    "arrays written": 3,
    "arrays renamed": 3,
    "manifest begin": 3,
    "manifest writing": 3,
    "manifest written": 3,
    "manifest renamed": 6,
    "committed": 6,
}


class Seen:
    """How often each point is come to until the checkpoint of iteration 6 is being written by the second rank."""

    def __init__(self):
        self.counts = {}

    def __call__(self, point):
        self.counts[point] = self.counts.get(point, 0) + 1


@pytest.mark.parametrize("point", POINTS)
def test_whenever_a_kill_comes_the_newest_whole_checkpoint_is_gone_on_from(point, demo_directory, tmp_path):
    runs = Runs(demo_directory, tmp_path, "--stages", "2")
    expected = runs.run("unbroken", "--iters", "8")
    kept = ["--checkpoint-dir", str(runs.checkpoints), "--checkpoint-every", "3", "--iters", "8"]
    count = {"committed": 2, "arrays writing": 450}.get(point, 4)
    script = [sys.executable, str(ROOT / "tests" / "killed_writing.py"), point, str(count)]
    flags = [*runs.flags, "--adapter-path", str(tmp_path / "out"), *kept]
    killed = subprocess.run([*script, *flags], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert killed.returncode == -9, killed.stderr
    done = runs.run("out", *kept, "--resume", "auto")
    assert len(done.losses) == 8 - POINTS[point]
    assert_same_end(done, expected)
    assert runs.names() == ["0000006-of-2", "0000008-of-2"]


class Killed(BaseException):
    """Ends whoever writes, as a kill does: nothing is cleaned up."""


@pytest.mark.parametrize("num_points", range(0, 60, 3))
def test_a_kill_at_any_point_leaves_the_checkpoint_before_whole(num_points, tmp_path):
    trained = Trained(tmp_path)
    trained.step_and_save(1)
    left = [num_points]

    def at(point):
        left[0] -= 1
        if left[0] < 0:
            raise Killed(point)

    trained.checkpoints = Checkpoints(tmp_path, 2, SETTINGS, at=at)
    try:
        trained.step_and_save(2)
    except Killed:
        assert "0000001-of-2" in trained.whole()
    else:
        assert trained.whole() == ["0000001-of-2", "0000002-of-2"]
    trained.checkpoints = Checkpoints(tmp_path, 2, SETTINGS)
    trained.checkpoints.begin(Name(1, 2), [Name(2, 2)])
    trained.step_and_save(3)
    assert trained.names() == trained.whole() == ["0000001-of-2", "0000003-of-2"]


def test_a_kill_while_a_part_is_written_over_leaves_no_manifest_that_speaks_for_other_arrays(tmp_path):
    trained = Trained(tmp_path, num_stages=1)
    trained.step_and_save(2)
    trained.checkpoints = Checkpoints(tmp_path, 2, SETTINGS, at=kills_at("manifest begin"))
    with pytest.raises(Killed):
        trained.step_and_save(2)
    answer = examine(tmp_path, Name(2, 1), trained.pipeline.updated_by(0), SETTINGS)
    assert (answer.state, answer.seen) == ("lacking", ())


def kills_at(point):
    def at(here):
        if here == point:
            raise Killed(point)

    return at


# -- a full disk -------------------------------------------------------------------------------------------------------


@contextmanager
def largest_file(num_bytes):
    """The system refuses to write more into any file, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("num_bytes", [0, 100, 2000])
def test_a_disk_that_is_full_costs_the_checkpoint_and_nothing_else(num_bytes, tmp_path, caplog):
    trained = Trained(tmp_path)
    for iteration in (1, 2):
        assert trained.step_and_save(iteration)
    with largest_file(num_bytes):
        assert trained.step_and_save(3) is None
        assert trained.step_and_save(4) is None
    assert trained.names() == trained.whole() == ["0000001-of-2", "0000002-of-2"]
    assert "Rank 0 cannot write to" in caplog.text
    assert "0000004-of-2 counts for none" in caplog.text
    assert trained.step_and_save(5)
    assert trained.names() == trained.whole() == ["0000002-of-2", "0000005-of-2"]


ROOM = 20_000
"""Bytes: enough for what a run writes of itself, too few for its adapters."""


@pytest.mark.parametrize("flags", [(), ("--save-every", "1"), ("--save-best",), ("--fine-tune-type", "full")])
def test_adapters_that_find_a_full_disk_are_one_message_and_those_of_before_stay(
    flags, demo_directory, tmp_path, capsys
):
    runs = Runs(demo_directory, tmp_path, "--stages", "2", *flags)
    runs.run("out", "--iters", "1")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*adapters.safetensors")}
    kept = ["--checkpoint-dir", str(runs.checkpoints), "--iters", "2", "--adapter-path", str(tmp_path / "out")]
    with largest_file(ROOM):
        assert main(["train", *runs.flags, *kept]) == 1
    said = capsys.readouterr().err
    assert f"[adapter-path] Cannot write {tmp_path / 'out'}" in said
    assert "File too large" in said
    assert f"--resume auto: the newest checkpoint is in {runs.checkpoints}" in said
    assert "Traceback" not in said
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*adapters.safetensors")} == before
    assert not list((tmp_path / "out").glob(".*partial*"))


def test_a_whole_model_that_finds_a_full_disk_is_one_message(demo_directory, tmp_path):
    model, tokenizer, config = load(str(demo_directory / "model"), lazy=True, return_config=True)
    parts, slots = (model, tokenizer, config), find_slots(model)
    with (
        largest_file(ROOM),
        pytest.raises(SaveError, match=rf"Cannot write {tmp_path / 'out'}: .*Unable to write \d+ bytes"),
    ):
        save_whole_model(tmp_path / "out", demo_directory / "model", slots, {}, parts)


def test_a_report_that_finds_a_full_disk_is_left_out_and_the_run_goes_on(tmp_path, caplog):
    metrics = Metrics(tmp_path / "metrics.jsonl")
    report = {"iteration": 1, "val_loss": 2.0}
    metrics.on_val_loss_report(report)
    with largest_file((tmp_path / "metrics.jsonl").stat().st_size + 10):
        metrics.on_val_loss_report({**report, "iteration": 2})
    metrics.on_val_loss_report({**report, "iteration": 3})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [1, 3]
    assert "This report is not in it." in caplog.text


# -- parts -------------------------------------------------------------------------------------------------------------


def test_what_is_saved_again_is_not_written_again(tmp_path):
    seen = Seen()
    trained = Trained(tmp_path, at=seen)
    folder = trained.step_and_save(1)
    before = dict(seen.counts)
    assert trained.checkpoints.save(trained.pipeline, trained.optimizer, progress(1)) == folder
    assert seen.counts == before


@pytest.mark.parametrize("world", [{}, {"capacity": 0}, {"lanes": "single", "capacity": 0}, {"seed": 5}])
def test_gathered_parts_make_a_whole_checkpoint_on_the_first_rank(world, tmp_path):
    """Each rank has a directory of its own, as on machines that share none."""
    trained = Trained(tmp_path / "all", num_stages=3)
    whole = trained.step_and_save(1)
    folders = [tmp_path / str(rank) / whole.name for rank in range(3)]
    for rank, folder in enumerate(folders):
        folder.mkdir(parents=True)
        for kind in ("json", "safetensors"):
            (folder / f"rank{rank}.{kind}").write_bytes((whole / f"rank{rank}.{kind}").read_bytes())
    loopback = LoopbackWorld(3, **world)
    loopback.run({rank: gather_parts(loopback.transport(rank), folders[rank]) for rank in range(3)})
    assert [ranks_in(folder) for folder in folders] == [[0, 1, 2], [1], [2]]
    for path in whole.iterdir():
        assert (folders[0] / path.name).read_bytes() == path.read_bytes()
    assert len(visible_parts(folders[0])) == 3


def test_a_shared_parameter_is_in_the_part_of_every_rank_that_reads_it(tmp_path):
    pipeline, optimizer = Pipeline(tiny(4, tied=True), 3), optim.Adam(1e-2)
    pipeline.step(optimizer, *batch(), 2)
    folder = Checkpoints(tmp_path, 2, SETTINGS).save(pipeline, optimizer, progress(1))
    holding = [part.rank for part in visible_parts(folder) if "embed.weight" in part.parameters]
    assert holding == [0, 2]
    first, last = (mx.load(str(folder / f"rank{rank}.safetensors")) for rank in holding)
    for name in ("parameters.embed.weight", "optimizer.embed.weight.m", "optimizer.step"):
        assert mx.array_equal(first[name], last[name])
