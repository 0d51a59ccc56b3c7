import json

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model, save_config, save_model
from tiny import LLAMA, is_lazy, leaves, llama

from pptrain.errors import ModelError
from pptrain.outline import from_config, outline


def shapes(model):
    return {name: (tuple(array.shape), array.dtype) for name, array in tree_flatten(model.parameters())}


def test_a_directory_with_weights_is_looked_at_without_reading_them(demo_directory):
    model = outline(demo_directory / "model")
    assert all(is_lazy(array) for array in leaves(model.parameters()).values())


def test_a_config_alone_gives_the_shapes_of_the_files(demo_directory):
    path = demo_directory / "model" / "config.json"
    config = {**json.loads(path.read_text()), "torch_dtype": "float32"}
    assert shapes(from_config(config)) == shapes(load_model(demo_directory / "model", lazy=True)[0])


@pytest.mark.parametrize("mode", [{"group_size": 32, "bits": 4}, {"group_size": 32, "bits": 4, "mode": "mxfp4"}])
def test_a_quantized_config_alone_gives_the_shapes_of_quantized_files(tmp_path, mode):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 64}
    model = llama(2, dtype=mx.bfloat16, **sizes)
    nn.quantize(model, **mode)
    config = {**LLAMA, **sizes, "num_hidden_layers": 2, "quantization": mode}
    save_model(tmp_path, model)
    save_config(config, tmp_path / "config.json")
    assert shapes(from_config(config)) == shapes(outline(tmp_path))


def test_a_directory_without_weights_and_its_config_are_the_same(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert shapes(outline(tmp_path)) == shapes(outline(tmp_path / "config.json"))


def test_nothing_is_computed_and_no_random_number_is_used():
    mx.random.seed(7)
    state = [bytes(memoryview(a)) for a in mx.random.state]
    model = from_config(LLAMA)
    assert all(is_lazy(array) for array in leaves(model.parameters()).values())
    assert [bytes(memoryview(a)) for a in mx.random.state] == state


def test_a_path_without_a_config_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"Cannot read .*nowhere.*config\.json.*--model"):
        outline(tmp_path / "nowhere")


def test_a_config_of_no_known_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "abacus"}')
    with pytest.raises(ModelError, match="Model type abacus not supported"):
        outline(tmp_path)
