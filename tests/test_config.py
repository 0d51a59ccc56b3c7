import dataclasses
import json

import pytest
import yaml
from mlx_lm.lora import CONFIG_DEFAULTS, build_parser

from pptrain.config import TrainConfig, build_train_parser, parse
from pptrain.errors import ConfigError
from pptrain.registry import SCHEDULES

# The example that mlx-lm's documentation points to, with every key it shows, the commented ones included.
MLX_LM_EXAMPLE = """
model: "mlx_model"
train: true
fine_tune_type: lora
optimizer: AdamW
optimizer_config:
  adamw:
    betas: [0.9, 0.98]
    eps: 1e-6
    weight_decay: 0.05
    bias_correction: true
data: "mlx-community/WikiSQL"
seed: 0
num_layers: 16
batch_size: 4
iters: 1000
val_batches: 25
learning_rate: 1e-5
steps_per_report: 10
steps_per_eval: 200
resume_adapter_file: null
adapter_path: "adapters"
save_every: 100
test: false
test_batches: 100
max_seq_length: 2048
grad_checkpoint: false
lora_parameters:
  keys: ["self_attn.q_proj", "self_attn.v_proj"]
  rank: 8
  scale: 20.0
  dropout: 0.0
lr_schedule:
  name: cosine_decay
  warmup: 100
  warmup_init: 1e-7
  arguments: [1e-5, 1000, 1e-7]
hf_dataset:
  path: "billsum"
  train_split: "train[:1000]"
  valid_split: "train[-100:]"
  prompt_feature: "text"
  completion_feature: "summary"
"""

MLX_LM_FLAGS = """
--model m --train --data d --fine-tune-type dora --optimizer muon --mask-prompt --num-layers -1 --batch-size 2 --iters 7
--val-batches -1 --learning-rate 1e-4 --steps-per-report 3 --steps-per-eval 5 --grad-accumulation-steps 2
--adapter-path a --save-every 9 --test --test-batches -1 --max-seq-length 64 --grad-checkpoint
--clear-cache-threshold 1.5GB --report-to wandb,swanlab --project-name p --seed 3 --trust-remote-code
"""


def write(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return ["--config", str(path)]


def refused(argv, **keys):
    with pytest.raises(ConfigError) as caught:
        TrainConfig(**keys) if keys else parse(argv)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_every_default_is_mlx_lms_own_except_that_train_is_implied():
    config = dataclasses.asdict(parse([]))
    assert {name: config[name] for name in CONFIG_DEFAULTS} == CONFIG_DEFAULTS | {"train": True}


def test_every_flag_of_mlx_lm_is_a_flag_here():
    ours = {option for action in build_train_parser()._actions for option in action.option_strings}
    theirs = {option for action in build_parser()._actions for option in action.option_strings}
    assert theirs <= ours


def test_a_command_line_made_for_mlx_lm_means_the_same():
    argv = MLX_LM_FLAGS.split()
    theirs = {name: value for name, value in vars(build_parser().parse_args(argv)).items() if value is not None}
    ours = dataclasses.asdict(parse(argv))
    assert {name: ours[name] for name in theirs} == theirs
    assert ours["recompute"] == "layer"


def test_the_example_yaml_of_mlx_lm_runs_unchanged(tmp_path):
    config = parse(write(tmp_path, MLX_LM_EXAMPLE))
    assert config.optimizer == "adamw"
    assert config.optimizer_config == {
        "adamw": {"betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": 0.05, "bias_correction": True}
    }
    assert config.lora_parameters["keys"] == ["self_attn.q_proj", "self_attn.v_proj"]
    assert config.learning_rate == 1e-5
    assert config.lr_schedule is not None
    assert config.lr_schedule["arguments"] == [1e-5, 1000, 1e-7]
    assert config.hf_dataset == yaml.safe_load(MLX_LM_EXAMPLE)["hf_dataset"]


def test_the_adapter_config_that_mlx_lm_writes_can_be_read_back(tmp_path):
    saved = CONFIG_DEFAULTS | {"train": True, "iters": 12}
    assert parse(write(tmp_path, json.dumps(saved, indent=4))).iters == 12


def test_a_saved_configuration_of_our_own_can_be_read_back(tmp_path):
    config = parse(["--layers", "2,1,1", "--max-grad-norm", "0.5", "--clear-cache-threshold", "4GB", "--test"])
    saved = write(tmp_path, json.dumps(vars(config.namespace())))
    assert dataclasses.replace(parse(saved), config=None) == config


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path):
    file = write(tmp_path, "iters: 5\nseed: 4\ntest: true\nmask_prompt: true\n")
    config = parse([*file, "--iters", "6", "--no-mask-prompt"], defaults={"seed": 1, "batch_size": 2})
    assert (config.iters, config.seed, config.batch_size, config.mask_prompt) == (6, 4, 2, False)


@pytest.mark.parametrize(
    ("argv", "text", "trains", "tests"),
    [
        ([], "", True, False),
        (["--train"], "", True, False),
        (["--test"], "", False, True),
        (["--train", "--test"], "", True, True),
        ([], "test: true", False, True),
        (["--train"], "test: true", True, True),
        (["--test"], "train: true", True, True),
        ([], "train: false\ntest: true", False, True),
    ],
)
def test_train_is_implied_unless_only_test_is_given(tmp_path, argv, text, trains, tests):
    config = parse([*argv, *write(tmp_path, text)])
    assert (config.train, config.test) == (trains, tests)


def test_neither_train_nor_test_is_refused(tmp_path):
    assert "Give --train or --test" in refused(write(tmp_path, "train: false"))


@pytest.mark.parametrize("text", ["", "iters:\n", "# nothing\n"])
def test_a_key_without_a_value_is_a_key_that_is_not_there(tmp_path, text):
    assert parse(write(tmp_path, text)).iters == CONFIG_DEFAULTS["iters"]


def test_an_unknown_key_names_the_nearest(tmp_path):
    message = refused(write(tmp_path, "batchsize: 4"))
    assert "run.yaml] Unknown key 'batchsize'. Did you mean batch_size?" in message


def test_an_unknown_flag_names_the_nearest():
    assert "Unknown argument '--itres'. Did you mean --iters?" in refused(["--itres", "3"])


def test_a_flag_is_not_abbreviated():
    assert "Did you mean --iters?" in refused(["--iter", "3"])


@pytest.mark.parametrize(
    ("key", "wrong", "nearest"),
    [
        ("schedule", "1f2b", "1f1b"),
        ("transport", "loopbak", "loopback"),
        ("recompute", "layers", "layer"),
        ("optimizer", "adammw", "adamw"),
        ("fine_tune_type", "ful", "full"),
    ],
)
def test_an_unknown_choice_names_the_nearest_from_flag_file_and_python(tmp_path, key, wrong, nearest):
    flag = "--" + key.replace("_", "-")
    messages = [
        (flag, refused([flag, wrong])),
        (f"run.yaml] {key}", refused(write(tmp_path, f"{key}: {wrong}"))),
        (key, refused([], **{key: wrong})),
    ]
    for where, message in messages:
        assert f"{where} is '{wrong}'. Expected one of " in message
        assert f"Did you mean {nearest}?" in message


def test_every_registered_schedule_is_a_choice():
    assert [parse(["--schedule", name]).schedule for name in SCHEDULES] == list(SCHEDULES)
    assert ", ".join(SCHEDULES) in refused(["--schedule", "none"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("iters: many", "iters is 'many'. Expected a whole number of at least 0."),
        ("iters: 1.5", "iters is 1.5. Expected a whole number"),
        ("iters: true", "iters is True. Expected a whole number"),
        ("learning_rate: fast", "learning_rate is 'fast'. Expected a number of at least 0."),
        ("learning_rate: .nan", "learning_rate is nan. Expected a number"),
        ("mask_prompt: 1", "mask_prompt is 1. Expected true or false."),
        ("model: 7", "model is 7. Expected text."),
        ("batch_size: 0", "batch_size is 0. Expected a whole number of at least 1."),
        ("seed: 4294967296", "seed is 4294967296. Expected a whole number of at least 0 and below 4294967296."),
        ("max_grad_norm: 0", "max_grad_norm is 0. Expected a number above 0."),
        ("layers: [2, x]", "layers is (2, 'x'). Expected a whole number of at least 1 for each stage"),
        ("layers: 2;2", "layers is '2;2'. Expected"),
        ("layers: 2,0", "layers is (2, 0). Expected"),
        ("clear_cache_threshold: 4XB", "clear_cache_threshold is '4XB'. Expected a whole number"),
        ("hf_dataset: wikisql", "hf_dataset is 'wikisql'. Expected a mapping or a list of mappings."),
        ("hf_dataset: {train_split: train}", "hf_dataset: path is None. Expected text."),
        ("hf_dataset: {path: p, name: n}", "hf_dataset has no key 'name'."),
        ("hf_dataset: {path: p}\ntest: true", "hf_dataset: test_split is None."),
        ("lora_parameters: {rank: 8, dropout: 0.0, alpha: 16}", "lora_parameters has no key 'alpha'."),
        ("lora_parameters: {rank: 8, dropout: 0.0}", "lora_parameters has no scale. It needs rank, dropout, scale."),
        ("lora_parameters: {rank: 8, dropout: 1.0, scale: 1}", "lora_parameters: dropout is 1.0. Expected a number"),
        ("lora_parameters: {rank: 8, dropout: 0, scale: 1, keys: q}", "lora_parameters: keys is 'q'."),
        ("lora_parameters: {rank: 8, dropout: 0, scale: 1, keys: []}", "lora_parameters: keys is []."),
        ("optimizer_config: {adm: {}}", "optimizer_config has no key 'adm'. Did you mean adam?"),
        ("optimizer_config: {adam: {beta: 1}}", "optimizer_config: adam has no key 'beta'. Did you mean betas?"),
        ("optimizer_config: {adam: }", "optimizer_config: adam is None. Expected a mapping."),
        ("lr_schedule: {name: cosine, arguments: [1]}", "Did you mean cosine_decay?"),
        ("lr_schedule: {name: cosine_decay}", "MLX makes no schedule of it (KeyError: 'arguments')"),
        ("lr_schedule: {name: cosine_decay, arguments: [1]}", "MLX makes no schedule of it (TypeError: "),
        ("report_to: tensorboard", "report_to names 'tensorboard'. Expected wandb, swanlab, or both."),
        ("- iters: 3", "Expected a mapping of keys to values, but found list."),
        ("iters: [", "This is no YAML:"),
    ],
)
def test_a_wrong_value_in_a_file_names_file_key_value_and_what_was_expected(tmp_path, text, message):
    assert message in refused(write(tmp_path, text))


def test_a_file_that_is_not_there_is_named():
    assert "[--config] Cannot read no/such.yaml" in refused(["--config", "no/such.yaml"])


def test_a_key_that_stands_only_in_files_says_so():
    assert "lora_parameters stands only in a YAML file" in refused(["--lora-parameters", "x"])


@pytest.mark.parametrize("text", ["layers: 10,8,8", "layers: [10, 8, 8]"])
def test_layers_are_read_from_text_and_lists(tmp_path, text):
    assert parse(write(tmp_path, text)).layers == (10, 8, 8)
    assert parse(["--layers", "10,8,8", "--stages", "3"]).layers == (10, 8, 8)


def test_layers_may_be_auto_for_schedules_of_one_stage_a_rank():
    assert parse(["--layers", "auto", "--stages", "3"]).num_ranks(1) == 3
    assert "zb-v has 2. List the layers" in refused(["--layers", "auto", "--schedule", "zb-v"])
    assert "for each stage, such as 10,8,8 or auto" in refused(["--layers", "automatic"])


def test_layers_for_another_number_of_stages_are_refused():
    assert "--layers 10,8,8 has 3 entries for --stages 2" in refused(["--layers", "10,8,8", "--stages", "2"])


def test_more_microbatches_than_examples_are_refused():
    assert "a batch of 4 into 5 microbatches" in refused(["--batch-size", "4", "--microbatches", "5"])
    assert parse(["--batch-size", "4", "--microbatches", "4"]).microbatches == 4


def test_grad_checkpoint_means_recompute_layer_unless_recompute_is_given():
    assert parse(["--grad-checkpoint"]).recompute == "layer"
    assert parse(["--grad-checkpoint", "--recompute", "stage"]).recompute == "stage"
    assert "recompute is none" in refused(["--grad-checkpoint", "--recompute", "none"])


def test_an_adapter_file_that_is_not_there_is_refused():
    assert "no file x.safetensors" in refused(["--resume-adapter-file", "x.safetensors"])


def test_the_help_names_the_one_difference_from_mlx_lm_and_the_files_keys(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    assert "every token weighs the same; mlx-lm takes the mean of the batches' means" in text
    assert "0 means all, too" in text
    assert "hf_dataset: Hub data sets" in text


def test_what_mlx_lm_changes_in_its_arguments_does_not_change_the_configuration():
    config = TrainConfig(hf_dataset={"path": "p"})
    config.namespace().hf_dataset["mask_prompt"] = True
    assert config.hf_dataset == {"path": "p"}
    assert not hasattr(config.namespace(), "prompt_feature")
    assert TrainConfig(prompt_feature="q").namespace().prompt_feature == "q"


def test_two_configurations_share_no_mapping():
    one, other = TrainConfig(), TrainConfig()
    assert one == other
    assert one.lora_parameters is not other.lora_parameters
    assert one.lora_parameters is not CONFIG_DEFAULTS["lora_parameters"]


def test_interleaved_takes_a_number_of_stages_a_rank_and_an_entry_of_layers_for_each_stage():
    config = parse(["--schedule", "interleaved", "--stages-per-rank", "3", "--stages", "2", "--layers", "1,1,1,1,1,1"])
    assert (config.stages_on_each_rank, config.num_ranks(1)) == (3, 2)
    assert parse(["--schedule", "zb-v", "--layers", "2,1,1,2"]).num_ranks(1) == 2
    assert parse(["--schedule", "zb-v"]).num_ranks(4) == 4


def test_layers_that_do_not_fit_the_stages_a_rank_are_refused():
    assert "Give 4, 2 for each" in refused(["--schedule", "zb-v", "--stages", "2", "--layers", "3,3"])
    assert "Give 2 for each rank of zb-v" in refused(["--schedule", "zb-v", "--layers", "3,3,3"])
    assert "1f1b was asked for with 2 stages a rank" in refused(["--stages-per-rank", "2"])
