"""Case 29: an operation without a gradient is found before the data are read, on every rank, and nobody waits."""

import json
import shutil
import time
from pathlib import Path

import mlx.core as mx
import odd_models
import pytest
from odd_models import built
from processes import report, run_ranks

from pptrain import Pipeline
from pptrain.cli import main
from pptrain.errors import ModelError
from pptrain.model import find_layers


@pytest.fixture(scope="module")
def without_gradient(demo_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "model"
    shutil.copytree(demo_directory / "model", directory)
    shutil.copy(Path(__file__).parent / "no_gradient.py", directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"model_file": "no_gradient.py"}))
    return directory


def arguments(model: Path, stages: int, *more: str) -> list[str]:
    where = ["--model", str(model), "--trust-remote-code", "--data", "no/such/data", "--num-layers", "-1", *more]
    return ["train", "--train", *where, "--stages", str(stages)]


def test_an_operation_without_a_gradient_is_found_before_the_data_are_read(without_gradient, capsys, tmp_path):
    code = main([*arguments(without_gradient, 2), "--adapter-path", str(tmp_path)])
    said = capsys.readouterr().err
    assert code == 2, said
    assert "[stage 1]" in said
    assert "(BitsLayer)" in said
    assert "View" in said
    assert "no/such/data" not in said


@pytest.mark.ring
def test_every_rank_ends_with_code_2_and_names_stage_layer_and_class(without_gradient, tmp_path):
    command = ["-m", "pptrain", *arguments(without_gradient, 2), "--adapter-path", str(tmp_path)]
    start = time.monotonic()
    ended = run_ranks([command] * 2, timeout_seconds=60, environment={"MLX_DISABLE_COMPILE": "1"})
    assert [rank.returncode for rank in ended] == [2, 2], report(ended)
    assert all("[stage 1]" in rank.stderr and "(BitsLayer)" in rank.stderr for rank in ended), report(ended)
    assert time.monotonic() - start < 60


def test_a_dry_run_names_the_stage_the_layer_and_its_class():
    model = built(odd_models.WithoutGradient)
    with pytest.raises(ModelError, match=r"\[stage 1\] Layer 2 \(BitsLayer\) cannot be trained: .*View"):
        Pipeline(model, layers=(2, 2)).dry_run()
    find_layers(model)[0].freeze()
    model.embed.freeze()
    find_layers(model)[1].freeze()
    find_layers(model)[2].freeze()
    Pipeline(model, layers=(2, 2)).dry_run()  # nothing at or before it trains


def test_a_dry_run_reads_no_weight_and_leaves_the_random_state(tmp_path):
    model = built(odd_models.Everything)
    path = tmp_path / "weights.safetensors"
    model.save_weights(str(path))
    model.load_weights(str(path))
    path.write_bytes(b"")  # whoever read a weight now would fail
    before = mx.random.state[0].tolist()
    Pipeline(model, layers=(1, 2, 1)).dry_run()
    assert mx.random.state[0].tolist() == before
