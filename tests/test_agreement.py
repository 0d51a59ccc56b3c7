"""Ranks that were started differently: each difference is named by its flag, on every rank."""

import json

import pytest

from pptrain.agreement import agree, differences, file_digest, model_digest, settings_of
from pptrain.config import TrainConfig
from pptrain.errors import RanksDisagree
from transports import LoopbackWorld

LAYERS = (3, 3)


@pytest.fixture
def model(tmp_path):
    """A model's directory, as far as it is looked at."""
    return write_model(tmp_path / "model")


def write_model(directory, hidden=64, weights=b"weights"):
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"hidden_size": hidden}))
    (directory / "model.safetensors").write_bytes(weights)
    return directory


def settings(model, data="d1", layers=LAYERS, **values):
    return settings_of(TrainConfig(**values), model, data, layers)


def told(*everybody):
    """What each rank of a loopback is told: a message, or nothing."""
    world = LoopbackWorld(len(everybody))

    def listening(transport, mine):
        try:
            yield from agree(transport, mine)
        except RanksDisagree as error:
            return str(error)
        return ""

    said = world.run({rank: listening(world.transport(rank), mine) for rank, mine in enumerate(everybody)})
    return list(said.values())


def named(*everybody):
    """Names in the lines that say what differs."""
    messages = set(told(*everybody))
    assert len(messages) == 1, "the ranks were told different things"
    return [line.split(":")[0].strip() for line in messages.pop().splitlines() if line.startswith("  ")]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_equal_settings_pass(model, num_ranks):
    assert told(*[settings(model, seed=3, schedule="gpipe")] * num_ranks) == [""] * num_ranks


@pytest.mark.parametrize(
    ("flag", "here", "there"),
    [
        ("seed", {"seed": 0}, {"seed": 7}),
        ("batch-size", {"batch_size": 4}, {"batch_size": 8}),
        ("microbatches", {"microbatches": 2}, {"microbatches": 4}),
        ("microbatches", {}, {"microbatches": 4}),
        ("schedule", {}, {"schedule": "gpipe"}),
        ("recompute", {"recompute": "layer"}, {"recompute": "stage"}),
        ("learning-rate", {"learning_rate": 1e-5}, {"learning_rate": 1e-4}),
        ("iters", {"iters": 10}, {"iters": 11}),
        ("num-layers", {"num_layers": 2}, {"num_layers": 3}),
        ("lora-parameters", {}, {"lora_parameters": {"rank": 4, "dropout": 0.0, "scale": 2.0}}),
        ("layers", {"layers": (3, 3)}, {"layers": (2, 4)}),
        ("data", {"data": "d1"}, {"data": "d2"}),
    ],
)
def test_what_differs_is_named_by_its_flag_and_nothing_else_is(model, flag, here, there):
    assert named(settings(model, **here), settings(model, **there)) == [flag]


def test_each_difference_has_a_line_with_every_ranks_value(model):
    everybody = [settings(model), settings(model, seed=7), settings(model, seed=7, batch_size=8)]
    [message] = set(told(*everybody))
    assert "\n  batch-size: rank 0 has 4, rank 1 has 4, rank 2 has 8\n" in message
    assert "\n  seed: rank 0 has 0, rank 1 has 7, rank 2 has 7\n" in message
    assert message.startswith("[start] Ranks were started with different settings:")


def test_another_number_of_stages_is_another_cut(model):
    assert named(settings(model, layers=(6,)), settings(model, layers=(3, 3))) == ["layers", "stages"]


def test_a_cut_that_is_given_is_the_cut_that_is_made_by_default(model):
    """What counts is the cut, not which flags led to it."""
    assert told(settings(model), settings_of(TrainConfig(layers=LAYERS), model, "d1", LAYERS)) == ["", ""]
    assert told(settings(model), settings_of(TrainConfig(stages=2), model, "d1", LAYERS)) == ["", ""]


@pytest.mark.parametrize("other", [{"hidden": 32}, {"weights": b"longer weights"}])
def test_another_model_is_named_though_its_directory_has_the_same_name(model, tmp_path, other):
    (tmp_path / "elsewhere").mkdir()
    there = write_model(tmp_path / "elsewhere" / "model", **other)
    assert named(settings(model), settings(there)) == ["model"]


def test_where_files_lie_may_differ(model, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    there = write_model(tmp_path / "elsewhere" / "model")
    more = {"model": str(there), "adapter_path": "/elsewhere", "project_name": "other", "transport": "loopback"}
    assert told(settings(model), settings_of(TrainConfig(**more), there, "d1", LAYERS)) == ["", ""]


@pytest.mark.parametrize("package", ["mlx", "mlx-lm", "pptrain"])
def test_another_version_is_named_by_its_package(model, package):
    mine = settings(model)
    assert mine[package][0].isdigit()
    assert named(mine, mine | {package: "0.0.1"}) == [package]


def test_resumed_adapters_are_compared_by_their_contents(model, tmp_path):
    files = [tmp_path / name for name in ("a.safetensors", "b.safetensors", "c.safetensors")]
    for file, contents in zip(files, (b"same", b"same", b"other"), strict=True):
        file.write_bytes(contents)
    same, twin, other = (settings(model, resume_adapter_file=str(file)) for file in files)
    assert told(same, twin) == ["", ""]
    assert named(same, other) == ["resume-adapter-file"]
    assert named(same, settings(model)) == ["resume-adapter-file"]
    assert file_digest(files[0]) == file_digest(files[1]) != file_digest(files[2])


def test_a_setting_that_only_one_rank_has_is_a_difference():
    assert differences([{"seed": "0"}, {"seed": "0", "new": "1"}]) == ["new: rank 0 has none, rank 1 has 1"]
    assert differences([{"seed": "0"}, {"seed": "0"}]) == []


def test_settings_of_any_length_and_letters_are_compared(model):
    mine = settings(model) | {"text-feature": "näme", "lora-parameters": "k" * 100_000}
    assert told(mine, dict(mine)) == ["", ""]
    assert named(mine, mine | {"lora-parameters": "k" * 99_999 + "x"}) == ["lora-parameters"]
    assert named(mine, mine | {"text-feature": "name"}) == ["text-feature"]


def test_an_equal_setting_is_not_named_though_one_rank_has_to_shorten_its_values(model):
    mine = settings(model) | {"text-feature": "t" * 100, "lora-parameters": "short"}
    assert named(mine, mine | {"lora-parameters": "k" * 100_000}) == ["lora-parameters"]


def test_a_models_digest_follows_config_and_the_names_and_sizes_of_its_weights(model, tmp_path):
    first = model_digest(model)
    assert model_digest(write_model(tmp_path / "twin")) == first
    (model / "README.md").write_text("no part of the model")
    assert model_digest(model) == first
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    assert model_digest(model) != first
