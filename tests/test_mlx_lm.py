"""One stage and one microbatch are mlx_lm.lora's own run, its draws from the data stream included."""

import json
import types
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm import lora
from mlx_lm.tuner.callbacks import TrainingCallback
from mlx_lm.tuner.datasets import load_dataset
from mlx_lm.utils import load
from tiny import assert_bit_equal, relative_difference

from pptrain.cli import main
from pptrain.config import parse
from pptrain.recipe import load_base, prepare_training


class Reports(TrainingCallback):
    def __init__(self):
        self.train, self.valid = [], []

    def on_train_loss_report(self, train_info):
        self.train.append(train_info)

    def on_val_loss_report(self, val_info):
        self.valid.append(val_info)


def write_yaml(path: Path, demo: Path, **more) -> Path:
    """A file made for mlx_lm.lora: 9 rows of 4 are two batches, so that the order is drawn anew within the run."""
    data = path / "data"
    data.mkdir()
    for name, count in (("train", 9), ("valid", 13)):
        rows = (demo / "data" / f"{name}.jsonl").read_text().splitlines()[:count]
        (data / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    settings = {
        "model": str(demo / "model"),
        "train": True,
        "data": str(data),
        "seed": 3,
        "num_layers": 4,
        "batch_size": 4,
        "iters": 7,
        "val_batches": 2,
        "learning_rate": 1e-3,
        "steps_per_report": 2,
        "steps_per_eval": 3,
        "save_every": 3,
        "adapter_path": str(path / "theirs"),
        "max_seq_length": 64,
        "mask_prompt": True,
        "lora_parameters": {"rank": 4, "dropout": 0.0, "scale": 2.0},
        "lr_schedule": {"name": "cosine_decay", "warmup": 2, "arguments": [1e-3, 20, 1e-5]},
        **more,
    }
    (path / "lora.yaml").write_text(json.dumps(settings))  # JSON is YAML
    return path / "lora.yaml"


def arguments(path: Path) -> types.SimpleNamespace:
    return types.SimpleNamespace(**{**lora.CONFIG_DEFAULTS, **json.loads(path.read_text())})


def run_mlx_lm(path: Path) -> Reports:
    """What `mlx_lm.lora --config` does, with its reports kept."""
    args, reports = arguments(path), Reports()
    np.random.seed(args.seed)
    model, tokenizer = load(args.model)
    train_set, valid_set, _ = load_dataset(args, tokenizer)
    lora.train_model(args, model, train_set, valid_set, reports)
    return reports


def run_ours(path: Path, *more: str) -> tuple[Path, list[dict]]:
    out = path.parent / "ours"
    assert main(["train", "--config", str(path), "--adapter-path", str(out), *more]) == 0
    return out, [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("fine_tune_type", ["lora", "dora", "full"])
def test_one_stage_with_one_microbatch_is_mlx_lm_loras_run(fine_tune_type, demo_directory, tmp_path, capsys):
    path = write_yaml(tmp_path, demo_directory, fine_tune_type=fine_tune_type)
    theirs = run_mlx_lm(path)
    out, ours = run_ours(path, "--stages", "1", "--microbatches", "1")
    for kind, expected in (("train_loss", theirs.train), ("val_loss", theirs.valid)):
        found = [report for report in ours if kind in report]
        assert [report["iteration"] for report in found] == [report["iteration"] for report in expected]
        assert [report[kind] for report in found] == pytest.approx([report[kind] for report in expected], rel=1e-5)
    for name in ("learning_rate", "trained_tokens"):
        found = [report[name] for report in ours if name in report]
        assert found == [report[name] for report in theirs.train]
    for name in ("adapters.safetensors", "0000003_adapters.safetensors", "0000006_adapters.safetensors"):
        mine, other = mx.load(str(out / name)), mx.load(str(tmp_path / "theirs" / name))
        assert relative_difference(mine, other) < 1e-5


@pytest.mark.parametrize("fine_tune_type", ["lora", "dora", "full"])
def test_adapters_go_from_mlx_lm_to_us_and_back_and_both_train_on(fine_tune_type, demo_directory, tmp_path):
    def adapters(directory):
        return dict(sorted(mx.load(str(directory / "adapters.safetensors")).items()))

    path = write_yaml(tmp_path, demo_directory, fine_tune_type=fine_tune_type)
    settings = json.loads(path.read_text())
    run_mlx_lm(path)
    first = tmp_path / "theirs"
    out, _ = run_ours(path, "--stages", "3", "--iters", "0", "--resume-adapter-file", f"{first}/adapters.safetensors")
    assert_bit_equal(adapters(out), adapters(first))
    for iters, same in ((0, assert_bit_equal), (3, lambda a, b: None)):
        resumed = {"iters": iters, "resume_adapter_file": str(out / "adapters.safetensors")}
        path.write_text(json.dumps({**settings, **resumed, "adapter_path": str(tmp_path / f"back{iters}")}))
        run_mlx_lm(path)
        same(adapters(tmp_path / f"back{iters}"), adapters(out))
    on, _ = run_ours(path, "--stages", "2", "--microbatches", "1")
    assert relative_difference(adapters(on), adapters(tmp_path / "back3")) < 1e-5
    assert relative_difference(adapters(on), adapters(first)) > 1e-3


def test_initial_adapters_are_mlx_lms_whatever_the_cut(demo_directory, tmp_path):
    path = write_yaml(tmp_path, demo_directory, iters=0)
    run_mlx_lm(path)
    theirs = mx.load(str(tmp_path / "theirs" / "adapters.safetensors"))
    for stages in ("1", "2", "3"):
        out, _ = run_ours(path, "--stages", stages)
        mine = mx.load(str(out / "adapters.safetensors"))
        assert_bit_equal(dict(sorted(mine.items())), dict(sorted(theirs.items())))


def test_a_lazily_loaded_model_gets_the_same_adapters_as_one_in_memory(demo_directory):
    config = parse(["--model", str(demo_directory / "model"), "--num-layers", "3", "--seed", "7"])
    lazy = load_base(config).model
    prepare_training(lazy, config)
    eager, _ = load(str(demo_directory / "model"))
    prepare_training(eager, config)
    assert_bit_equal(lazy.trainable_parameters(), eager.trainable_parameters())
    assert len(tree_flatten(lazy.trainable_parameters())) == 3 * 7 * 2


def test_accumulated_batches_weigh_tokens_and_so_differ_from_mlx_lms_mean_of_means(demo_directory, tmp_path):
    path = write_yaml(tmp_path, demo_directory, grad_accumulation_steps=2, iters=6, lr_schedule=None)
    run_mlx_lm(path)
    out, ours = run_ours(path, "--stages", "2")
    mine, other = mx.load(str(out / "adapters.safetensors")), mx.load(str(tmp_path / "theirs" / "adapters.safetensors"))
    assert relative_difference(mine, other) > 1e-4
    assert [report["iteration"] for report in ours if "train_loss" in report] == [2, 4, 6]
