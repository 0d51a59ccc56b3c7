import json
import re
import shutil
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten
from tiny import assert_bit_equal, leaves, same_bits

from pptrain.cli import main


def flags(demo: Path, out: Path, *more: str) -> list[str]:
    where = ["--model", str(demo / "model"), "--data", str(demo / "data"), "--adapter-path", str(out)]
    run = ["--num-layers", "-1", "--iters", "2", "--batch-size", "2", "--val-batches", "0", "--learning-rate", "1e-3"]
    return ["train", *where, *run, "--max-seq-length", "64", *more]


def test_version_names_pptrain_mlx_and_mlx_lm(capsys):
    assert main(["--version"]) == 0
    assert re.fullmatch(r"pptrain \S+ \(mlx 0\.\S+, mlx-lm 0\.\S+\)\n", capsys.readouterr().out)


@pytest.mark.parametrize("argv", [[], ["tarin"], ["--demo"]])
def test_an_unknown_command_shows_the_usage_and_exits_2(argv, capsys):
    assert main(argv) == 2
    assert "usage: pptrain train" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--stages", "7"], "PartitionError: [stages] Cannot divide 6 layers into 7 stages"),
        (["--layers", "3,2"], "3,2 covers 5 layers"),
        (["--schedule", "1f1"], "1f1b"),
        (["--stagse", "2"], "--stages"),
        (["--model", "nowhere/at-all"], "ModelError: [model] Cannot load nowhere/at-all"),
        (["--data", "/nowhere"], "DataError"),
        (["--num-layers", "9"], "9 layers are to be trained, but the model has 6"),
        (["--transport", "ring"], "mlx.launch"),
        (["--transport", "jaccl"], "mlx.launch"),
        (["--test", "--adapter-path", "/nowhere"], "Cannot load adapters from /nowhere"),
        (["--batch-size", "500"], "500"),
    ],
)
def test_a_mistake_is_one_message_without_traceback_and_exit_code_2(more, said, demo_directory, tmp_path, capsys):
    assert main(flags(demo_directory, tmp_path / "out", *more)) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


def test_lora_keys_that_match_nothing_are_refused_with_those_that_would(demo_directory, tmp_path, capsys):
    config = tmp_path / "lora.yaml"
    config.write_text("lora_parameters: {rank: 4, scale: 2.0, dropout: 0.0, keys: [self_attn.q_poj]}\n")
    assert main(flags(demo_directory, tmp_path / "out", "--config", str(config))) == 2
    error = capsys.readouterr().err
    assert "self_attn.q_poj" in error
    assert "self_attn.q_proj" in error


def test_three_stages_train_adapters_that_mlx_lm_loads_with_the_logits_of_one_stage(demo_directory, tmp_path):
    tokens = mx.array([[5, 9, 70, 101, 33]])
    logits = []
    for stages in ("1", "3"):
        out = tmp_path / stages
        assert main(flags(demo_directory, out, "--stages", stages)) == 0
        model, _ = mlx_lm.load(str(demo_directory / "model"), adapter_path=str(out))
        logits.append(model(tokens))
    base, _ = mlx_lm.load(str(demo_directory / "model"))
    assert same_bits(*logits)
    assert not mx.array_equal(logits[0], base(tokens)).item()


def test_a_full_fine_tune_leaves_a_model_directory_that_mlx_lm_loads(demo_directory, tmp_path):
    out = tmp_path / "full"
    assert main(flags(demo_directory, out, "--fine-tune-type", "full", "--num-layers", "2", "--stages", "2")) == 0
    trained, _ = mlx_lm.load(str(out))
    base, _ = mlx_lm.load(str(demo_directory / "model"))
    before, after = leaves(base.parameters()), leaves(trained.parameters())
    assert before.keys() == after.keys()
    changed = {name for name in before if not same_bits(before[name], after[name])}
    assert changed == {name for name in before if re.match(r"model\.layers\.[45]\.", name)}
    saved = mx.load(str(out / "adapters.safetensors"))
    assert_bit_equal(dict(sorted(saved.items())), {name: after[name] for name in sorted(changed)})


def test_dora_over_two_stages_is_one_stages(demo_directory, tmp_path):
    for stages in ("1", "2"):
        options = ["--fine-tune-type", "dora", "--stages", stages]
        assert main(flags(demo_directory, tmp_path / stages, *options)) == 0
    one, two = (mx.load(str(tmp_path / stages / "adapters.safetensors")) for stages in ("1", "2"))
    assert_bit_equal(dict(sorted(two.items())), dict(sorted(one.items())))


def test_a_quantized_base_trains_adapters_over_three_stages(demo_directory, tmp_path):
    quantized = tmp_path / "quantized"
    mlx_lm.convert(str(demo_directory / "model"), str(quantized), quantize=True, q_group_size=32, q_bits=4)
    shutil.copytree(demo_directory / "data", tmp_path / "data")
    quantized.rename(tmp_path / "model")
    for stages in ("1", "3"):
        assert main(flags(tmp_path, tmp_path / stages, "--stages", stages)) == 0
    one, three = (mx.load(str(tmp_path / stages / "adapters.safetensors")) for stages in ("1", "3"))
    assert_bit_equal(dict(sorted(three.items())), dict(sorted(one.items())))
    assert any(mx.any(array).item() for name, array in one.items() if name.endswith("lora_b"))


def test_training_goes_on_from_a_resumed_adapter_file(demo_directory, tmp_path):
    first = tmp_path / "first"
    assert main(flags(demo_directory, first, "--stages", "2")) == 0
    resume = ["--resume-adapter-file", str(first / "adapters.safetensors"), "--iters", "0"]
    assert main(flags(demo_directory, tmp_path / "second", "--stages", "3", *resume)) == 0
    before, after = (mx.load(str(tmp_path / run / "adapters.safetensors")) for run in ("first", "second"))
    assert_bit_equal(dict(sorted(after.items())), dict(sorted(before.items())))


def test_test_alone_prints_the_loss_of_the_trained_adapters_and_trains_nothing(demo_directory, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(flags(demo_directory, out, "--stages", "2")) == 0
    before = (out / "adapters.safetensors").read_bytes()
    losses = []
    for stages in ("1", "3"):
        capsys.readouterr()
        assert main(flags(demo_directory, out, "--test", "--test-batches", "3", "--stages", stages)) == 0
        losses.append(capsys.readouterr().out)
    assert losses[0] == losses[1]
    assert re.search(r"Test loss \d+\.\d+, Test ppl \d+\.\d+\.", losses[0])
    assert (out / "adapters.safetensors").read_bytes() == before


def test_a_yaml_made_for_mlx_lm_lora_runs_unchanged_and_flags_win_over_it(demo_directory, tmp_path):
    config = tmp_path / "lora.yaml"
    config.write_text(
        f"""
model: "{demo_directory / "model"}"
train: true
fine_tune_type: lora
optimizer: adamw
optimizer_config:
  adamw:
    betas: [0.9, 0.98]
    eps: 1e-6
data: "{demo_directory / "data"}"
seed: 0
num_layers: 2
batch_size: 2
iters: 50
val_batches: 1
learning_rate: 1e-5
steps_per_report: 1
steps_per_eval: 200
resume_adapter_file: null
adapter_path: "{tmp_path / "out"}"
save_every: 100
test: false
test_batches: 1
max_seq_length: 64
grad_checkpoint: false
lora_parameters:
  keys: ["self_attn.q_proj", "self_attn.v_proj"]
  rank: 8
  scale: 20.0
  dropout: 0.0
lr_schedule:
  name: cosine_decay
  warmup: 2
  warmup_init: 1e-7
  arguments: [1e-5, 1000, 1e-7]
"""
    )
    assert main(["train", "--config", str(config), "--iters", "3", "--stages", "2"]) == 0
    reports = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [report["iteration"] for report in reports if "train_loss" in report] == [1, 2, 3]
    assert [report["learning_rate"] for report in reports if "train_loss" in report] == pytest.approx(
        [1e-7, 5.05e-6, 1e-5], rel=1e-3
    )
    names = {name for name, _ in tree_flatten(mx.load(str(tmp_path / "out" / "adapters.safetensors")))}
    assert {name.split(".")[2] for name in names} == {"4", "5"}


def test_layers_auto_trains_with_the_balanced_cut_and_writes_the_same_adapters(demo_directory, tmp_path, capsys):
    assert main(flags(demo_directory, tmp_path / "auto", "--stages", "2", "--layers", "auto")) == 0
    cut = re.search(r"Balanced cut: --layers (\d+,\d+)\n", capsys.readouterr().out)
    assert cut is not None
    assert sum(map(int, cut[1].split(","))) == 6
    assert json.loads((tmp_path / "auto" / "run.json").read_text())["settings"]["layers"] == cut[1]
    assert main(flags(demo_directory, tmp_path / "listed", "--layers", cut[1])) == 0
    found, expected = (mx.load(str(tmp_path / name / "adapters.safetensors")) for name in ("auto", "listed"))
    assert_bit_equal(found, expected)
