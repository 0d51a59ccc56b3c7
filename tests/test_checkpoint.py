"""What a run leaves behind, and how it comes together on the first rank."""

import json

import mlx.core as mx
import pytest
from mlx_lm import load
from tiny import assert_bit_equal, copied, leaves, llama, put_lora_on, same_bits, tiny

from pptrain import Pipeline
from pptrain.checkpoint import ADAPTERS, gather, save_adapter_config, save_adapters, save_whole_model
from pptrain.errors import ConfigError, SaveError
from pptrain.model import find_slots
from pptrain.optimizer import to_tree
from transports import LoopbackWorld

ARRAYS = {"layers.0.lora_a": mx.array([[1.0, 2.0]]), "layers.1.lora_b": mx.array([3.0], mx.bfloat16)}


def names_in(directory):
    return sorted(path.name for path in directory.iterdir())


# -- gathering ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [{}, {"capacity": 0}, {"lanes": "single", "capacity": 0}, {"seed": 5}])
def test_the_first_rank_gets_each_parameter_from_the_rank_that_holds_its_truth(world):
    held = [["embed.weight", "layers.0.linear.bias"], [], ["layers.2.linear.weight"], ["norm.weight", "head.weight"]]
    loopback, models = LoopbackWorld(4, **world), [tiny(4, seed=rank) for rank in range(4)]
    tasks = {r: gather(loopback.transport(r), find_slots(model), held) for r, model in enumerate(models)}
    gathered = loopback.run(tasks)
    for rank, arrays in gathered.items():
        truth = {name: leaves(models[r].parameters())[name] for r in range(rank, 4) for name in held[r]}
        assert list(arrays) == list(truth)
        assert [name for name in truth if not same_bits(arrays[name], truth[name])] == []


def test_gathering_changes_no_parameter():
    world, models = LoopbackWorld(2), [tiny(2, seed=rank, dtype=mx.bfloat16) for rank in range(2)]
    before = [copied(model.parameters()) for model in models]
    held = [["embed.weight"], ["head.weight"]]
    world.run({r: gather(world.transport(r), find_slots(model), held) for r, model in enumerate(models)})
    for model, then in zip(models, before, strict=True):
        assert [name for name, array in leaves(model.parameters()).items() if not same_bits(array, then[name])] == []


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_a_pipeline_gathers_what_trains_each_once(num_stages):
    model = tiny(4, tied=True)
    model.layers[1].freeze()
    pipeline = Pipeline(model, num_stages)
    gathered = pipeline.gather()
    trained = leaves(model.trainable_parameters())
    assert gathered.keys() == trained.keys()
    assert [name for name in trained if not same_bits(gathered[name], trained[name])] == []
    held = [name for rank in range(num_stages) for name in pipeline.trained_by(rank)]
    assert sorted(held) == sorted(trained)


# -- adapters ----------------------------------------------------------------------------------------------------------


def test_adapters_are_written_under_mlx_lms_name_with_the_models_names_and_dtypes(tmp_path):
    path = save_adapters(tmp_path / "new" / "adapters", ARRAYS)
    assert path == tmp_path / "new" / "adapters" / "adapters.safetensors"
    assert names_in(path.parent) == [ADAPTERS]
    assert_bit_equal(dict(sorted(mx.load(str(path)).items())), ARRAYS)


def test_an_iteration_has_a_numbered_copy_besides_the_newest(tmp_path):
    later = {name: array + 1 for name, array in ARRAYS.items()}
    assert save_adapters(tmp_path, ARRAYS, 100) == tmp_path / "0000100_adapters.safetensors"
    save_adapters(tmp_path, later, 1_000_000)
    assert names_in(tmp_path) == ["0000100_adapters.safetensors", "1000000_adapters.safetensors", ADAPTERS]
    for name, expected in zip(names_in(tmp_path), (ARRAYS, later, later), strict=True):
        assert_bit_equal(dict(sorted(mx.load(str(tmp_path / name)).items())), expected)


def test_writing_again_leaves_a_file_that_was_opened_before_as_it_was(tmp_path):
    """The new file is renamed into its place, so no reader and no kill ever sees half of it."""
    before = save_adapters(tmp_path, ARRAYS).read_bytes()
    with (tmp_path / ADAPTERS).open("rb") as opened:
        save_adapters(tmp_path, {name: array + 1 for name, array in ARRAYS.items()})
        assert opened.read() == before
    assert (tmp_path / ADAPTERS).read_bytes() != before
    assert names_in(tmp_path) == [ADAPTERS]


def test_what_a_kill_left_behind_is_written_over(tmp_path):
    (tmp_path / f".{ADAPTERS.removesuffix('.safetensors')}.partial.safetensors").write_bytes(b"half")
    path = save_adapters(tmp_path, ARRAYS)
    assert_bit_equal(dict(sorted(mx.load(str(path)).items())), ARRAYS)
    assert names_in(tmp_path) == [ADAPTERS]


def test_saved_adapters_and_their_config_are_what_mlx_lm_loads(demo_directory, tmp_path):
    model, _ = load(str(demo_directory / "model"))
    put_lora_on(model, num_layers=2)
    parameters = {"rank": 2, "scale": 2.0, "dropout": 0.0}
    save_adapter_config(tmp_path, {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters})
    save_adapters(tmp_path, Pipeline(model, 2).gather())
    found, _ = load(str(demo_directory / "model"), adapter_path=str(tmp_path))
    assert_bit_equal(found.parameters(), model.parameters())


def test_the_adapter_config_is_json_with_every_key(tmp_path):
    config = {"fine_tune_type": "dora", "layers": (2, 3), "seed": 4, "lora_parameters": None}
    save_adapter_config(tmp_path / "new", config)
    assert json.loads((tmp_path / "new" / "adapter_config.json").read_text()) == {**config, "layers": [2, 3]}
    assert config["layers"] == (2, 3)


# -- bad directories ---------------------------------------------------------------------------------------------------


def test_a_file_where_the_directory_should_be_is_the_users_mistake_with_its_path(tmp_path):
    (tmp_path / "file").write_text("in the way")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=rf"\[adapter-path\] Cannot write to {directory}: .*--adapter-path"):
            save_adapter_config(directory, {"seed": 1})
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_save_that_fails_leaves_the_one_before(tmp_path):
    before = save_adapters(tmp_path, ARRAYS).read_bytes()
    (tmp_path / "0000005_adapters.safetensors" / "in the way").mkdir(parents=True)
    with pytest.raises(SaveError, match=r"\[adapter-path\] Cannot write .*0000005_adapters.*Is a directory"):
        save_adapters(tmp_path, ARRAYS, 5)
    assert (tmp_path / ADAPTERS).read_bytes() == before


# -- whole models ------------------------------------------------------------------------------------------------------


def test_a_whole_model_is_what_was_trained_and_otherwise_its_source(demo_directory, tmp_path):
    source = demo_directory / "model"
    model, tokenizer, config = load(str(source), lazy=True, return_config=True)
    trained = {"model.layers.3.mlp.up_proj.weight": mx.full((128, 64), 0.25)}
    save_whole_model(tmp_path / "out", source, find_slots(model), trained, (model, tokenizer, config))
    found, its_tokenizer = load(str(tmp_path / "out"))
    expected = leaves(load(str(source))[0].parameters()) | trained
    assert_bit_equal(found.parameters(), to_tree(expected))
    assert its_tokenizer.encode("letters") == tokenizer.encode("letters")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_hidden_layers"] == 6


def test_the_model_can_be_used_after_it_was_saved(demo_directory, tmp_path):
    source = demo_directory / "model"
    model, tokenizer, config = load(str(source), lazy=True, return_config=True)
    before = copied(model.parameters())
    save_whole_model(tmp_path, source, find_slots(model), {}, (model, tokenizer, config))
    assert [name for name, array in leaves(model.parameters()).items() if not same_bits(array, before[name])] == []


def test_a_saved_config_does_not_change_the_callers(demo_directory, tmp_path):
    model, config = llama(1), {"model_type": "llama", "seed": 1}
    _, tokenizer = load(str(demo_directory / "model"), lazy=True)
    save_whole_model(tmp_path, demo_directory / "model", find_slots(model), {}, (model, tokenizer, config))
    assert config == {"model_type": "llama", "seed": 1}
