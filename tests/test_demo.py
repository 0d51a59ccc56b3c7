import filecmp
import json

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.lora import train_model
from mlx_lm.tuner.callbacks import TrainingCallback
from mlx_lm.tuner.datasets import load_dataset

from pptrain.config import parse
from pptrain.data import load_data
from pptrain.demo import PROMPT, demo_settings, write_demo


@pytest.fixture(scope="module")
def loaded(demo_directory):
    return mlx_lm.load(str(demo_directory / "model"))


def rows(directory, name):
    return [json.loads(line) for line in (directory / "data" / f"{name}.jsonl").read_text().splitlines()]


def test_the_same_seed_writes_the_same_bytes_and_another_seed_others(demo_directory, tmp_path):
    write_demo(tmp_path / "same")
    write_demo(tmp_path / "other", seed=1)
    files = [str(file.relative_to(demo_directory)) for file in demo_directory.rglob("*") if file.is_file()]
    same, different, missing = filecmp.cmpfiles(demo_directory, tmp_path / "same", files, shallow=False)
    assert (len(same), different, missing) == (len(files), [], [])
    _, different, _ = filecmp.cmpfiles(demo_directory, tmp_path / "other", files, shallow=False)
    assert {"model/model.safetensors", "data/train.jsonl"} <= set(different)


def test_mlx_lm_loads_the_model_with_six_layers_and_an_untied_head(loaded):
    model, tokenizer = loaded
    weights = dict(tree_flatten(model.parameters()))
    assert len(model.layers) == 6
    assert weights["lm_head.weight"].shape == weights["model.embed_tokens.weight"].shape == (len(tokenizer), 64)
    assert all(mx.isfinite(weight).all() for weight in weights.values())


def test_one_token_is_one_byte_and_its_number_the_bytes_value(loaded):
    _, tokenizer = loaded
    text = "Grüße, 世界 \t\n\x00~" + "".join(map(chr, range(0x80, 0x100)))
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    detokenizer = tokenizer.detokenizer
    for token in tokenizer.encode("naïve  twice"):
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == "naïve  twice"


def test_the_chat_template_renders_a_prompt_as_it_does_in_the_whole(loaded, demo_directory):
    _, tokenizer = loaded
    messages = rows(demo_directory, "train")[0]["messages"]
    whole = tokenizer.apply_chat_template(messages)
    prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True)
    assert whole[: len(prompt)] == prompt
    assert tokenizer.decode(whole[len(prompt) :]) == messages[-1]["content"] + "<|end|>"
    assert whole[-1] == tokenizer.eos_token_id
    assert tokenizer.eos_token_ids == {tokenizer.eos_token_id}


def test_every_answer_in_the_data_is_right(demo_directory):
    for name, count in (("train", 240), ("valid", 24), ("test", 24)):
        found = rows(demo_directory, name)
        assert len(found) == count
        for question, answer in (row["messages"] for row in found):
            first, last = question["content"].removeprefix("letters from ").split(" to ")
            assert answer["content"] == "".join(map(chr, range(ord(first), ord(last) + 1)))


def test_the_prompt_to_try_is_of_the_datas_kind(demo_directory):
    questions = [row["messages"][0]["content"] for row in rows(demo_directory, "train")]
    assert {question[:13] for question in questions} == {PROMPT[:13]}


def test_the_demos_settings_are_a_configuration_whose_data_can_be_trained(loaded, demo_directory):
    model, tokenizer = loaded
    config = parse(["--demo", "--stages", "2"], defaults=demo_settings(demo_directory))
    assert (config.demo, config.train, config.stages, config.num_layers) == (True, True, 2, -1)
    data = load_data(config, tokenizer, len(model.model.embed_tokens.weight))
    assert (len(data.train), len(data.valid)) == (240, 24)
    assert max(len(row.tokens) for row in data.train.rows) <= config.max_seq_length


class Losses(TrainingCallback):
    def __init__(self):
        self.validation = []

    def on_val_loss_report(self, val_info):
        self.validation.append(val_info["val_loss"])


def test_lora_on_the_demo_halves_the_loss_in_12_iterations_by_mlx_lms_own_trainer(demo_directory, tmp_path):
    settings = {"iters": 12, "steps_per_eval": 12, "adapter_path": str(tmp_path / "adapters")}
    config = parse([], defaults=demo_settings(demo_directory) | settings)
    model, tokenizer = mlx_lm.load(config.model)
    train, valid, _ = load_dataset(config.namespace(), tokenizer)
    np.random.seed(config.seed)
    losses = Losses()
    train_model(config.namespace(), model, train, valid, losses)
    before, after = losses.validation
    assert before > 7
    assert after < before / 2
