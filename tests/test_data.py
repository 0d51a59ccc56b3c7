import json
import logging

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.tuner.datasets import CacheDataset, load_dataset
from mlx_lm.tuner.trainer import iterate_batches

from pptrain.config import TrainConfig
from pptrain.data import load_data
from pptrain.errors import DataError

VOCABULARY = 260
# Renders a question by itself otherwise than before its answer, as templates that drop earlier thoughts do.
NO_PREFIX = (
    "{% for m in messages %}{% if loop.last and m['role'] == 'user' %}!{% endif %}{{ m['content'] }}{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer(demo_directory):
    return mlx_lm.load(str(demo_directory / "model"))[1]


@pytest.fixture
def rendering_otherwise(tokenizer):
    """The same tokenizer with a template whose prompt is no prefix of the whole."""
    before = tokenizer.chat_template
    tokenizer._tokenizer.chat_template = NO_PREFIX
    yield tokenizer
    tokenizer._tokenizer.chat_template = before


def chat(*contents, roles=("user", "assistant")):
    return {"messages": [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]}


def write(directory, **files):
    """Write each set's rows; a row that is text is written as it is."""
    for name, rows in files.items():
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (directory / f"{name}.jsonl").write_text("".join(line + "\n" for line in lines))
    return directory


def load(directory, tokenizer, vocab_size=VOCABULARY, **keys):
    return load_data(TrainConfig(data=str(directory), **{"batch_size": 1} | keys), tokenizer, vocab_size)


def refused(directory, tokenizer, **keys):
    with pytest.raises(DataError) as caught:
        load(directory, tokenizer, **keys)
    return str(caught.value)


def batches_of(dataset, batch_size, max_seq_length):
    np.random.seed(0)
    return [
        (np.array(batch).tolist(), np.array(lengths).tolist())
        for batch, lengths in iterate_batches(dataset, batch_size, max_seq_length)
    ]


FORMATS = {
    "chat": [chat("hi", "ho"), chat("a", "b", "c", "d"), chat("one", "two"), chat("3", "4"), chat("5", "66")],
    "tools": [{**chat("hi", "ho"), "tools": [{"type": "function"}]}, *[chat("a", "b" * i) for i in range(1, 5)]],
    "completions": [{"prompt": "p" * i, "completion": "c" * (9 - i)} for i in range(1, 6)],
    "text": [{"text": "x" * i, **dict.fromkeys("abc"[: i % 3])} for i in range(1, 71, 7)],
}


@pytest.mark.parametrize(
    ("form", "mask_prompt"), [(form, mask) for form in FORMATS for mask in (False, True) if form != "text" or not mask]
)
def test_batches_are_mlx_lms_own_in_its_order(tmp_path, tokenizer, form, mask_prompt):
    write(tmp_path, train=FORMATS[form], valid=FORMATS[form][::-1], test=FORMATS[form])
    config = TrainConfig(data=str(tmp_path), batch_size=2, mask_prompt=mask_prompt, max_seq_length=40, test=True)
    ours = load_data(config, tokenizer, VOCABULARY)
    theirs = load_dataset(config.namespace(), tokenizer)
    for rows, dataset in zip((ours.train, ours.valid, ours.test), theirs, strict=True):
        assert batches_of(rows, 2, 40) == batches_of(CacheDataset(dataset), 2, 40)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("max_seq_length", [8, 33, 64, 2048])
def test_supervised_tokens_are_those_that_mlx_lms_loss_counts(tmp_path, tokenizer, form, max_seq_length):
    write(tmp_path, train=FORMATS[form])
    masked = form != "text" and max_seq_length > 8
    data = load(tmp_path, tokenizer, max_seq_length=max_seq_length, mask_prompt=masked)
    counted = 0
    for batch, lengths in iterate_batches(data.train, len(data.train), max_seq_length):
        steps = mx.arange(1, batch.shape[1])
        counted += mx.logical_and(steps >= lengths[:, :1], steps <= lengths[:, 1:]).sum().item()
    assert data.supervised_tokens == counted > 0


def test_only_the_last_turn_of_a_chat_is_supervised_under_mask_prompt(tmp_path, tokenizer):
    write(tmp_path, train=[chat("first", "answer", "second", "last")])
    data = load(tmp_path, tokenizer, mask_prompt=True)
    (row,) = data.train.rows
    assert tokenizer.decode(row.tokens[row.offset :]) == "last<|end|>"
    assert data.supervised_tokens == len("last") + 1 + 1  # its end, and mlx-lm's one pad token


def test_sets_that_a_run_does_not_use_are_empty(tmp_path, tokenizer):
    write(tmp_path, train=FORMATS["chat"], valid=FORMATS["chat"], test=FORMATS["chat"])

    def sizes(**keys):
        data = load(tmp_path, tokenizer, **keys)
        return len(data.train), len(data.valid), len(data.test)

    assert sizes() == (5, 5, 0)
    assert sizes(val_batches=0) == (5, 0, 0)
    assert sizes(train=False, test=True) == (0, 0, 5)
    assert sizes(test=True) == (5, 5, 5)


def test_training_without_a_validation_file_is_fine(tmp_path, tokenizer):
    data = load(write(tmp_path, train=FORMATS["chat"]), tokenizer, batch_size=5)
    assert (len(data.train), len(data.valid)) == (5, 0)


def test_every_bad_row_is_named_in_one_error(tmp_path, tokenizer):
    write(
        tmp_path,
        train=[chat("a", "b"), {"prompt": "p"}, {"messages": "text"}, chat("c", "d"), {"messages": []}],
        valid=[chat("a", "b"), {"messages": [{"role": "user"}]}, {"text": "t"}],
    )
    message = refused(tmp_path, tokenizer, mask_prompt=True)
    assert message.startswith("5 of the data's rows or files cannot be used:")
    for where in ("train.jsonl:2: no key 'messages'", "train.jsonl:3: ", "train.jsonl:5: ", "valid.jsonl:2: "):
        assert f"{tmp_path}/{where}" in message
    assert "valid.jsonl:3: no key 'messages'" in message
    assert "train.jsonl:4" not in message


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"messages": [', "no JSON (Expecting value at column 15)"),
        ("", "no JSON (Expecting value at column 1)"),
        ("[1, 2]", "expected a JSON object, but found list"),
    ],
)
@pytest.mark.parametrize("name", ["train", "valid", "test"])
def test_a_malformed_line_of_any_file_is_named(tmp_path, tokenizer, name, line, problem):
    write(tmp_path, **{"train": [chat("a", "b")], name: [chat("a", "b"), line, chat("c", "d"), line]})
    message = refused(tmp_path, tokenizer)
    for number in (2, 4):
        assert f"{tmp_path}/{name}.jsonl:{number}: {problem}" in message


def test_a_file_without_rows_is_named(tmp_path, tokenizer):
    write(tmp_path, train=[chat("a", "b")], valid=[])
    assert f"{tmp_path}/valid.jsonl: is empty" in refused(tmp_path, tokenizer)


def test_a_file_that_is_no_text_is_named(tmp_path, tokenizer):
    (tmp_path / "train.jsonl").write_bytes(b'{"text": "\xff"}\n')
    assert f"{tmp_path}/train.jsonl: cannot be read" in refused(tmp_path, tokenizer)


def test_lines_are_counted_as_mlx_lm_counts_them(tmp_path, tokenizer):
    separators = json.dumps({"text": "a\u2028b\x85c"}, ensure_ascii=False)
    write(tmp_path, train=[separators, "{", separators])
    message = refused(tmp_path, tokenizer)
    assert message.startswith("1 of the data's rows or files cannot be used:")
    assert "train.jsonl:2: no JSON" in message


def test_an_unknown_format_is_named_with_its_file(tmp_path, tokenizer):
    write(tmp_path, train=[{"question": "q"}])
    assert f"{tmp_path}/train.jsonl:1: Unsupported data format" in refused(tmp_path, tokenizer)


def test_keys_of_ones_own_are_read_by_the_features(tmp_path, tokenizer):
    write(tmp_path, train=[{"question": "q", "reply": "r"}])
    data = load(tmp_path, tokenizer, prompt_feature="question", completion_feature="reply")
    assert tokenizer.decode(data.train[0][0]) == "<|user|>q<|end|><|assistant|>r<|end|>"


def test_text_cannot_be_masked(tmp_path, tokenizer):
    write(tmp_path, train=[{"text": "abc"}])
    assert "train.jsonl:1: Prompt masking not supported" in refused(tmp_path, tokenizer, mask_prompt=True)


@pytest.mark.parametrize("text", ["", "<|end|>"])
def test_a_row_with_nothing_to_predict_is_named(tmp_path, tokenizer, text):
    write(tmp_path, train=[{"text": "abc"}, {"text": text}])
    assert f"{tmp_path}/train.jsonl:2: " in refused(tmp_path, tokenizer)


def test_a_token_outside_the_models_vocabulary_is_named(tmp_path, tokenizer):
    write(tmp_path, train=[{"text": "abc"}, {"text": "d<|assistant|>"}])
    message = refused(tmp_path, tokenizer, vocab_size=259)
    assert "train.jsonl:2: token 259 is outside the model's vocabulary of 259" in message
    assert "train.jsonl:1" not in message
    assert load(tmp_path, tokenizer, vocab_size=260).supervised_tokens > 0
    assert load(tmp_path, tokenizer, vocab_size=None).supervised_tokens > 0


def test_a_chat_that_does_not_end_with_the_assistant_cannot_be_masked(tmp_path, tokenizer):
    write(tmp_path, train=[chat("a", "b"), chat("a", "b", "c")])
    assert "train.jsonl:2: --mask-prompt trains the last turn, and it is not the assistant's" in refused(
        tmp_path, tokenizer, mask_prompt=True
    )
    assert len(load(tmp_path, tokenizer).train) == 2


def test_a_template_whose_prompt_is_no_prefix_is_refused_and_names_the_row(tmp_path, rendering_otherwise):
    write(tmp_path, train=[chat("a", "b")])
    message = refused(tmp_path, rendering_otherwise, mask_prompt=True)
    assert "train.jsonl:1: --mask-prompt needs a chat template that renders the prompt alone as" in message
    assert len(load(tmp_path, rendering_otherwise).train) == 1


def test_an_answer_that_renders_to_nothing_cannot_be_trained_alone(tmp_path, rendering_otherwise):
    rendering_otherwise._tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    write(tmp_path, train=[chat("abc", "")])
    assert "train.jsonl:1: --mask-prompt leaves nothing to train" in refused(
        tmp_path, rendering_otherwise, mask_prompt=True
    )


def test_a_prompt_that_reaches_the_limit_is_dropped_and_counted(tmp_path, tokenizer, caplog):
    # Three special tokens stand before the answer: 61 letters and they are exactly the limit.
    write(tmp_path, train=[chat("p" * 100, "a"), chat("p" * 61, "a"), chat("p" * 60, "a"), chat("p", "a")])
    with caplog.at_level(logging.WARNING):
        data = load(tmp_path, tokenizer, mask_prompt=True, max_seq_length=64)
    assert [row.where for row in data.train.rows] == [f"{tmp_path}/train.jsonl:{line}" for line in (3, 4)]
    (dropped,) = [record.message for record in caplog.records if record.message.startswith("Dropped")]
    assert dropped.startswith(f"Dropped 2 rows ({tmp_path}/train.jsonl:1, {tmp_path}/train.jsonl:2)")
    for row in data.train.rows:
        assert row.offset < 64


def test_dropping_too_many_rows_is_an_error(tmp_path, tokenizer):
    write(tmp_path, train=[chat("p" * 100, "a"), chat("p", "a")])
    message = refused(tmp_path, tokenizer, mask_prompt=True, max_seq_length=64, batch_size=2)
    assert "train has 1 rows to use, fewer than --batch-size 2" in message


def test_a_row_over_the_limit_is_truncated_with_a_warning(tmp_path, tokenizer, caplog):
    write(tmp_path, train=[{"text": "x" * 100}, {"text": "x"}])
    with caplog.at_level(logging.WARNING):
        data = load(tmp_path, tokenizer, max_seq_length=64)
    assert f"Truncated 1 rows ({tmp_path}/train.jsonl:1) to --max-seq-length 64" in caplog.text
    assert sorted(np.array(lengths)[0, 1] for _, lengths in iterate_batches(data.train, 1, 64)) == [2, 64]


@pytest.mark.parametrize("name", ["train", "valid", "test"])
def test_a_set_smaller_than_a_batch_is_refused_with_both_numbers(tmp_path, tokenizer, name):
    write(tmp_path, **{each: FORMATS["chat"] for each in ("train", "valid", "test")} | {name: FORMATS["chat"][:3]})
    assert f"{name} has 3 rows to use, fewer than --batch-size 4" in refused(
        tmp_path, tokenizer, batch_size=4, test=True
    )


def test_a_validation_set_that_is_not_used_may_be_small(tmp_path, tokenizer):
    write(tmp_path, train=FORMATS["chat"], valid=FORMATS["chat"][:1])
    assert len(load(tmp_path, tokenizer, batch_size=4, val_batches=0).train) == 5


def test_a_directory_that_is_not_there_is_named(tmp_path, tokenizer):
    with pytest.raises(DataError, match="--data no/such is no directory here"):
        load("no/such", tokenizer)


def test_a_directory_without_a_training_file_is_named(tmp_path, tokenizer):
    assert f"--data {tmp_path} cannot be loaded: Training set not found" in refused(tmp_path, tokenizer)


def test_long_lists_of_problems_have_places_alone_from_the_twentieth(tmp_path, tokenizer):
    write(tmp_path, train=[chat("a", "b"), *["[]"] * 50])
    message = refused(tmp_path, tokenizer)
    assert message.startswith("50 of the data's rows or files cannot be used:")
    assert f"{tmp_path}/train.jsonl:21: expected a JSON object" in message
    assert f"and 30 more: {tmp_path}/train.jsonl:22-51\n" in message
    assert message.endswith("leave rows out by --skip-bad-rows.")


def test_the_fingerprint_tells_data_sets_apart_that_give_other_batches(tmp_path, tokenizer):
    def fingerprint(rows, **keys):
        return load(write(tmp_path, train=rows), tokenizer, **keys).fingerprint()

    rows = FORMATS["chat"]
    same = fingerprint(rows)
    assert same == fingerprint(rows)
    others = [
        fingerprint(rows[:-1]),
        fingerprint(rows[::-1]),
        fingerprint([*rows[:-1], chat("5", "67")]),
        fingerprint([{**rows[0], "more": 1}, *rows[1:]]),
        fingerprint(rows, mask_prompt=True),
    ]
    assert len({same, *others}) == 6


# -- rows that are left out --------------------------------------------------------------------------------------------

BAD = {
    "no JSON": "{",
    "no object": "[1]",
    "no key": {"prompt": "p"},
    "no messages": {"messages": []},
    "no list": {"messages": "text"},
    "no tokens": {"messages": [{"role": "user"}]},
    "last turn not the assistant's": chat("a", "b", "c"),
}


@pytest.mark.parametrize("at", [0, 1, 5])
@pytest.mark.parametrize("kind", BAD)
def test_a_bad_row_is_left_out_and_the_others_make_the_batches_that_they_make_without_it(
    kind, at, tmp_path, tokenizer, caplog
):
    good = FORMATS["chat"]
    (tmp_path / "good").mkdir()
    expected = load(write(tmp_path / "good", train=good), tokenizer, mask_prompt=True)
    write(tmp_path, train=[*good[:at], BAD[kind], *good[at:]])
    assert f"train.jsonl:{at + 1}: " in refused(tmp_path, tokenizer, mask_prompt=True)
    caplog.clear()
    data = load(tmp_path, tokenizer, mask_prompt=True, skip_bad_rows=True)
    assert data.fingerprint() == expected.fingerprint()
    assert batches_of(data.train, 2, 40) == batches_of(expected.train, 2, 40)
    assert "Left out 1 rows that cannot be used:" in caplog.text
    assert f"{tmp_path}/train.jsonl:{at + 1}: " in caplog.text
    lines = [line for line in range(1, 7) if line != at + 1]
    assert [row.where for row in data.train.rows] == [f"{tmp_path}/train.jsonl:{line}" for line in lines]


def test_a_token_outside_the_vocabulary_is_left_out(tmp_path, tokenizer, caplog):
    write(tmp_path, train=[{"text": "abc"}, {"text": "d<|assistant|>"}])
    assert len(load(tmp_path, tokenizer, vocab_size=259, skip_bad_rows=True).train) == 1
    assert "train.jsonl:2: token 259 is outside" in caplog.text


def test_lines_and_rows_are_in_one_list(tmp_path, tokenizer):
    write(tmp_path, train=["{", chat("a", "b"), {"messages": []}], valid=["[]"], test=["no"])
    message = refused(tmp_path, tokenizer)
    assert message.startswith("4 of the data's rows or files cannot be used:")
    for where in ("train.jsonl:1", "train.jsonl:3", "valid.jsonl:1", "test.jsonl:1"):
        assert f"{tmp_path}/{where}: " in message


def test_a_file_that_cannot_be_read_is_refused_whatever_is_left_out(tmp_path, tokenizer):
    (tmp_path / "train.jsonl").write_bytes(b'{"text": "\xff"}\n')
    write(tmp_path, valid=[])
    message = refused(tmp_path, tokenizer, skip_bad_rows=True)
    assert f"{tmp_path}/train.jsonl: cannot be read" in message
    assert f"{tmp_path}/valid.jsonl: is empty" in message
    assert "--skip-bad-rows" not in message


@pytest.mark.parametrize("name", ["train", "valid", "test"])
def test_a_set_of_bad_rows_alone_is_refused_and_never_taken_for_none(name, tmp_path, tokenizer):
    write(tmp_path, **{each: FORMATS["chat"] for each in ("train", "valid", "test")} | {name: ["{", {"question": "q"}]})
    assert f"{name} has 0 rows to use" in refused(tmp_path, tokenizer, test=True, skip_bad_rows=True)


def test_places_of_several_files_are_told_in_ranges(tmp_path, tokenizer, caplog):
    rows = [chat("a", "b"), *["{"] * 21, chat("a", "b"), "{", "{"]
    write(tmp_path, train=rows, valid=[chat("a", "b"), "{"])
    load(tmp_path, tokenizer, skip_bad_rows=True)
    assert "Left out 24 rows" in caplog.text
    assert (
        f"and 4 more: {tmp_path}/train.jsonl:22, {tmp_path}/train.jsonl:24-25, {tmp_path}/valid.jsonl:2" in caplog.text
    )
