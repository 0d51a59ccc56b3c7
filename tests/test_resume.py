"""A run that goes on from a checkpoint is the run that was never stopped, bit for bit, whatever its stages are then."""

import json
import shutil

import mlx.core as mx
import numpy as np
import pytest
from runs import Runs, assert_same_end
from tiny import assert_bit_equal

from pptrain.errors import CheckpointError, ConfigError, NonFiniteError

# Stages and, by their number, another cut and schedule each time.
CUTS = [
    ("--stages", "3", "--schedule", "1f1b"),
    ("--layers", "4,2", "--schedule", "gpipe"),
    ("--stages", "1", "--schedule", "sequential"),
    ("--layers", "1,1,4", "--schedule", "zb-h1", "--recompute", "layer"),
]


@pytest.fixture
def runs(demo_directory, tmp_path):
    return Runs(demo_directory, tmp_path)


def dropout(tmp_path, **more):
    path = tmp_path / "lora.yaml"
    path.write_text(json.dumps({"lora_parameters": {"rank": 4, "scale": 2.0, "dropout": 0.2}, **more}))
    return ["--config", str(path)]


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        *((kind, optimizer) for kind in ("lora", "dora", "full") for optimizer in ("adam", "adafactor")),
        *(("lora", optimizer) for optimizer in ("adamw", "muon", "sgd")),
    ],
)
def test_every_three_steps_another_number_of_stages_cut_and_schedule(kind, optimizer, demo_directory, tmp_path):
    schedule = {"name": "cosine_decay", "warmup": 2, "arguments": [1e-3, 20, 1e-5]}
    flags = dropout(tmp_path, max_grad_norm=1.0, lr_schedule=schedule)
    runs = Runs(demo_directory, tmp_path, *flags, "--fine-tune-type", kind, "--optimizer", optimizer)
    unbroken = runs.run("unbroken", "--stages", "1", "--iters", "12")
    for iters, cut in zip((3, 6, 9, 12), CUTS, strict=True):
        done = runs.kept("broken", "--iters", str(iters), "--resume", "auto", *cut)
        assert len(done.losses) == 3
        assert done.losses == unbroken.losses[iters - 3 : iters]
    assert_same_end(done, unbroken)
    ours, theirs = (tmp_path / out / "adapters.safetensors" for out in ("broken", "unbroken"))
    assert_bit_equal(dict(sorted(mx.load(str(ours)).items())), dict(sorted(mx.load(str(theirs)).items())))
    names = ("iteration", "train_loss", "learning_rate", "trained_tokens", "grad_norm")
    regular = [report for report in runs.reports("broken", *names) if report[0] % 4 == 0]
    assert regular == runs.reports("unbroken", *names)


@pytest.mark.parametrize("iters", range(1, 8))
def test_wherever_it_is_stopped_the_next_batches_and_numpys_generator_are_the_unbroken_runs(iters, runs):
    expected = runs.run("unbroken", "--iters", "8")
    generator = np.random.get_state()[1].tobytes()
    runs.kept("broken", "--iters", str(iters))
    assert_same_end(runs.kept("broken", "--iters", "8", "--resume"), expected)
    assert np.random.get_state()[1].tobytes() == generator


def test_a_run_that_ends_within_an_accumulation_goes_on_from_its_last_update(demo_directory, tmp_path):
    runs = Runs(demo_directory, tmp_path, "--grad-accumulation-steps", "3")
    expected = runs.run("unbroken", "--iters", "9")
    runs.kept("broken", "--iters", "5")
    assert runs.names() == ["0000003-of-1"]
    done = runs.kept("broken", "--iters", "9", "--resume")
    assert len(done.losses) == 6
    assert_same_end(done, expected)


def test_resume_auto_without_a_checkpoint_starts_afresh_and_after_the_end_does_nothing(runs):
    expected = runs.run("plain", "--iters", "3")
    assert_same_end(runs.kept("kept", "--iters", "3", "--resume", "auto"), expected)
    again = runs.kept("kept", "--iters", "3", "--resume", "auto")
    assert again.losses == []
    assert_same_end(again, expected)
    assert runs.reports("kept", "iteration", "train_loss") == runs.reports("plain", "iteration", "train_loss")


def test_a_checkpoint_can_be_named_and_another_directory_written_to(runs, tmp_path):
    expected = runs.run("unbroken", "--iters", "6")
    runs.kept("first", "--iters", "4")
    other = ["--checkpoint-dir", str(tmp_path / "other"), "--checkpoint-every", "2"]
    named = runs.run("second", "--iters", "6", "--resume", str(runs.checkpoints / "0000003-of-1"), *other)
    assert len(named.losses) == 3
    assert_same_end(named, expected)
    assert_same_end(runs.run("third", "--iters", "6", "--resume", str(runs.checkpoints)), expected)
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == ["0000004-of-1", "0000006-of-1"]


def test_as_many_checkpoints_are_kept_as_were_asked_for(runs):
    runs.kept("out", "--iters", "13", "--keep", "3", "--stages", "2")
    assert runs.names() == ["0000009-of-2", "0000012-of-2", "0000013-of-2"]


def test_each_rank_writes_only_what_its_own_stages_train(runs):
    runs.kept("out", "--iters", "3", "--stages", "3")
    folder = runs.checkpoints / "0000003-of-3"
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        f"rank{rank}.{kind}" for rank in range(3) for kind in ("json", "safetensors")
    )
    layers = [{int(name.split(".layers.")[1].split(".")[0]) for name in parameters(folder, r)} for r in range(3)]
    assert layers == [{0, 1}, {2, 3}, {4, 5}]


def parameters(folder, rank):
    names = mx.load(str(folder / f"rank{rank}.safetensors"))
    return [name for name in names if name.startswith("parameters.")]


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_checkpoints_that_nobody_asked_to_go_on_from_are_refused(runs):
    runs.kept("out", "--iters", "3")
    with pytest.raises(ConfigError, match=r"has checkpoints already, the newest is 0000003-of-1.*--resume"):
        runs.kept("out", "--iters", "6")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--seed", "7"), "seed: it has 0, this run has 7"),
        (("--batch-size", "5"), "batch-size: it has 4, this run has 5"),
        (("--learning-rate", "1e-4"), "learning-rate: it has 0.001, this run has 0.0001"),
        (("--optimizer", "adamw"), 'optimizer: it has "adam", this run has "adamw"'),
        (("--val-batches", "0"), "val-batches: it has 1, this run has 0"),
        (("--skip-bad-rows",), "skip-bad-rows: it has false, this run has true"),
    ],
)
def test_other_settings_are_refused_by_the_flags_name(flags, said, runs):
    runs.kept("out", "--iters", "3")
    with pytest.raises(ConfigError) as caught:
        runs.kept("out", "--iters", "6", "--resume", *flags)
    assert said in str(caught.value)
    runs.kept("out", "--iters", "6", "--resume")


def test_a_run_that_leaves_bad_rows_out_goes_on_as_the_run_without_them(demo_directory, tmp_path):
    clean = Runs(demo_directory, tmp_path / "clean").run("out", "--iters", "8")
    runs = Runs(demo_directory, tmp_path / "bad", "--skip-bad-rows")
    path = runs.directory / "data" / "train.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(["{\n", *lines[:7], '{"messages": []}\n', *lines[7:]]))
    runs.kept("out", "--iters", "3", *CUTS[0])
    assert_same_end(runs.kept("out", "--iters", "8", "--resume", *CUTS[1]), clean)


def test_other_data_are_refused(runs):
    runs.kept("out", "--iters", "3")
    path = runs.directory / "data" / "train.jsonl"
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    with pytest.raises(ConfigError, match="data: it has "):
        runs.kept("out", "--iters", "6", "--resume")


def test_fewer_iterations_than_were_trained_are_refused(runs):
    runs.kept("out", "--iters", "3")
    with pytest.raises(ConfigError, match="of iteration 3, beyond --iters 2"):
        runs.kept("out", "--iters", "2", "--resume")


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_gone_on_from(runs, caplog):
    expected = runs.run("unbroken", "--iters", "9")
    runs.kept("out", "--iters", "6", "--stages", "2")
    damage(runs.checkpoints / "0000006-of-2" / "rank1.safetensors")
    done = runs.kept("out", "--iters", "9", "--resume", "auto", "--stages", "3")
    assert len(done.losses) == 6
    assert_same_end(done, expected)
    assert "0000006-of-2/rank1.safetensors is damaged: its checksum is " in caplog.text
    assert "Going on from the one before, 0000003-of-2" in caplog.text
    assert runs.names() == ["0000006-of-3", "0000009-of-3"]


def test_a_damaged_checkpoint_that_was_named_is_refused_and_the_one_before_offered(runs):
    runs.kept("out", "--iters", "6")
    named = runs.checkpoints / "0000006-of-1"
    damage(named / "rank0.json")
    with pytest.raises(CheckpointError) as caught:
        runs.kept("out", "--iters", "9", "--resume", str(named))
    assert f"{named / 'rank0.json'} is damaged" in str(caught.value)
    assert f"--resume {runs.checkpoints / '0000003-of-1'}" in str(caught.value)


def test_where_no_checkpoint_is_whole_the_run_is_not_begun_again(runs):
    runs.kept("out", "--iters", "6")
    for folder in runs.checkpoints.iterdir():
        damage(folder / "rank0.safetensors")
    with pytest.raises(CheckpointError) as caught:
        runs.kept("out", "--iters", "9", "--resume", "auto")
    for name in runs.names():
        assert f"{name}/rank0.safetensors is damaged" in str(caught.value)


def test_a_directory_without_checkpoints_that_was_named_is_refused(runs, tmp_path):
    with pytest.raises(CheckpointError, match=rf"There is no checkpoint in {tmp_path / 'none'}"):
        runs.run("out", "--iters", "3", "--resume", str(tmp_path / "none"))


@pytest.mark.parametrize("gone", ["rank1.json", "rank1.safetensors"])
def test_a_part_that_is_not_there_is_named(gone, runs):
    runs.kept("out", "--iters", "3", "--stages", "2")
    (runs.checkpoints / "0000003-of-2" / gone).unlink()
    with pytest.raises(CheckpointError) as caught:
        runs.run("out", "--iters", "6", "--resume", str(runs.checkpoints))
    assert "0000003-of-2" in str(caught.value)
    assert gone in str(caught.value)


def test_parts_of_two_runs_are_not_one_checkpoint(demo_directory, tmp_path):
    folders = []
    for name, seed in (("one", "1"), ("two", "2")):
        runs = Runs(demo_directory, tmp_path / name, "--seed", seed)
        runs.kept("out", "--iters", "3", "--stages", "2")
        folders.append(runs.checkpoints / "0000003-of-2")
    for kind in ("json", "safetensors"):
        shutil.copy(folders[0] / f"rank0.{kind}", folders[1])
    with pytest.raises(CheckpointError, match="has parts of different runs"):
        runs.kept("out", "--iters", "6", "--resume")


def damage(path):
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)


# -- numbers that are not finite, validation, a full disk --------------------------------------------------------------


def test_a_step_that_is_not_finite_stops_the_run_with_a_checkpoint_of_before_and_its_rows(demo_directory, tmp_path):
    runs = Runs(demo_directory, tmp_path, "--learning-rate", "1e30", "--optimizer", "sgd")
    with pytest.raises(NonFiniteError) as caught:
        runs.kept("out", "--iters", "6", "--stages", "2")
    assert "It was iteration 2, of the rows " in str(caught.value)
    assert str(caught.value).count("train.jsonl:") == 4
    assert f"The checkpoint of before is {runs.checkpoints / '0000001-of-2'}" in str(caught.value)
    assert runs.names() == ["0000001-of-2"]


def test_steps_that_are_not_finite_can_be_skipped_and_change_nothing(demo_directory, tmp_path, caplog):
    runs = Runs(demo_directory, tmp_path, "--learning-rate", "1e30", "--optimizer", "sgd", "--val-batches", "0")
    first = runs.run("first", "--iters", "1", "--stages", "2")
    done = runs.run("all", "--iters", "4", "--stages", "2", "--on-nonfinite", "skip")
    assert done.losses[0] == first.losses[0]
    assert np.isnan(done.losses[1:]).all()
    assert_bit_equal(done.pipeline.model.trainable_parameters(), first.pipeline.model.trainable_parameters())
    assert caplog.text.count("Its update was skipped.") == 3


def test_best_adapters_are_those_of_the_lowest_validation_loss(demo_directory, tmp_path):
    runs = Runs(demo_directory, tmp_path, "--learning-rate", "0.3", "--steps-per-eval", "1", "--save-every", "1")
    runs.run("out", "--iters", "6", "--save-best", "--stages", "2")
    losses = [loss for _, loss in runs.reports("out", "iteration", "val_loss")]
    best = losses.index(min(losses))
    assert best < 5, "the last is the best, so that nothing is shown"
    expected = "adapters" if best == 5 else f"{best:07d}_adapters"
    if best == 0:
        runs.run("initial", "--iters", "0")
        expected = "../initial/adapters"
    found = mx.load(str(tmp_path / "out" / "best_adapters.safetensors"))
    assert_bit_equal(
        dict(sorted(found.items())),
        dict(sorted(mx.load(str(tmp_path / "out" / f"{expected}.safetensors")).items())),
    )


def test_a_run_whose_validation_becomes_no_better_ends_early_and_stays_ended(demo_directory, tmp_path, capsys):
    runs = Runs(demo_directory, tmp_path, "--learning-rate", "0.3", "--steps-per-eval", "1", "--early-stop", "2")
    done = runs.kept("out", "--iters", "50")
    assert done.ended == "early"
    losses = [loss for _, loss in runs.reports("out", "iteration", "val_loss")]
    best = losses.index(min(losses))
    assert len(losses) == best + 3
    assert "Stopped early after iteration" in capsys.readouterr().out
    again = runs.kept("out", "--iters", "50", "--resume")
    assert (again.ended, again.losses) == ("early", [])
    assert_same_end(again, done)
