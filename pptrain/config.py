"""What a run is made of: one frozen dataclass, its command line and its YAML.

Every key of `mlx_lm.lora` is here under its name; its default, choices and help are read from mlx-lm, so that they
stand once. Flags win over the file, and the file over the defaults.
"""
# ruff: noqa: RUF009  # `_key` makes a field, whose default is made afresh for each configuration

import copy
import dataclasses
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import Any, Literal, NoReturn, get_args, get_type_hints

import yaml
from mlx_lm.lora import CONFIG_DEFAULTS, build_parser, yaml_loader
from mlx_lm.utils import _parse_size  # pyright: ignore[reportPrivateUsage]  # how mlx-lm reads 4GB

from pptrain import checks
from pptrain.errors import ConfigError
from pptrain.registry import SCHEDULES, count_stages_per_rank, find_schedule
from transports.distributed import TIMEOUT_SECONDS

_MLX_LM_FLAGS = {action.dest: action for action in build_parser()._actions}
_YAML_ONLY = "only in a YAML file"


def _key(default: Any, text: str, **metadata: Any) -> Any:
    """A key: its default, its help, and what a value must satisfy (`choices`, `at_least`, `above`, `read`)."""
    default_factory = lambda: copy.deepcopy(default)  # noqa: E731
    return dataclasses.field(default_factory=default_factory, metadata={"help": text, "default": default, **metadata})


def _mlx_lm(name: str, *, default: Any = None, more: str = "", **metadata: Any) -> Any:
    """A key of mlx_lm.lora, with mlx-lm's own default, choices and help; `more` is added to its help."""
    action = _MLX_LM_FLAGS.get(name)
    text = f"{(action and action.help) or ''} {more}".strip()
    if action is not None and action.choices:
        metadata["choices"] = action.choices
    return _key(CONFIG_DEFAULTS[name] if default is None else default, text, flag=action is not None, **metadata)


def _read_layers(value: Any) -> Any:
    """`"10,8,8"`, a list or one number as a tuple; `auto` as it is."""
    if value == "auto":
        return value
    if isinstance(value, str):
        return tuple(int(part) for part in value.split(","))
    return (value,) if isinstance(value, int) else tuple(value)


def _read_lower(value: Any) -> Any:
    """mlx-lm takes `AdamW` for `adamw`."""
    return value.lower() if isinstance(value, str) else value


def _read_size(value: Any) -> Any:
    return _parse_size(value) if isinstance(value, str) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """What `pptrain train` is asked to do.

    Raises:
        ConfigError: If a key has a value that it cannot have, or two keys contradict each other.
    """

    # As in mlx_lm.lora.
    model: str = _mlx_lm("model")
    train: bool = _mlx_lm("train", default=True, more="(implied unless only --test is given)")
    data: str = _mlx_lm("data")
    fine_tune_type: str = _mlx_lm("fine_tune_type")
    optimizer: str = _mlx_lm("optimizer", read=_read_lower)
    mask_prompt: bool = _mlx_lm("mask_prompt", more="(in a chat, all but the last turn)")
    num_layers: int = _mlx_lm("num_layers", more="0 means all, too, as in mlx-lm.", at_least=-1)
    batch_size: int = _mlx_lm(
        "batch_size", more="As in mlx-lm, shorter rows are padded, and one pad token of each is trained.", at_least=1
    )
    iters: int = _mlx_lm("iters", more="One iteration is one batch.", at_least=0)
    val_batches: int = _mlx_lm("val_batches", more="0 means no validation.", at_least=-1)
    learning_rate: float = _mlx_lm("learning_rate", at_least=0)
    steps_per_report: int = _mlx_lm("steps_per_report", at_least=1)
    steps_per_eval: int = _mlx_lm("steps_per_eval", at_least=1)
    grad_accumulation_steps: int = _mlx_lm(
        "grad_accumulation_steps",
        more="Here, and only here, pptrain differs from mlx-lm: the batches before one update count as one batch with "
        "more microbatches, so that every token weighs the same; mlx-lm takes the mean of the batches' means.",
        at_least=1,
    )
    resume_adapter_file: str | None = _mlx_lm("resume_adapter_file")
    adapter_path: str = _mlx_lm("adapter_path")
    save_every: int = _mlx_lm("save_every", at_least=1)
    test: bool = _mlx_lm("test")
    test_batches: int = _mlx_lm("test_batches", at_least=-1)
    max_seq_length: int = _mlx_lm("max_seq_length", at_least=2)
    config: str | None = _mlx_lm("config", more="(flags win over it)", short="-c")
    grad_checkpoint: bool = _mlx_lm("grad_checkpoint", more="The same as --recompute layer.")
    clear_cache_threshold: int = _mlx_lm("clear_cache_threshold", more="As 500MB or 4GB.", at_least=0, read=_read_size)
    report_to: str | None = _mlx_lm("report_to")
    project_name: str | None = _mlx_lm("project_name")
    seed: int = _mlx_lm("seed", at_least=0, below=2**32)
    trust_remote_code: bool = _mlx_lm("trust_remote_code")

    # As in mlx_lm.lora's YAML, which has no flags for them.
    optimizer_config: dict[str, Any] = _mlx_lm("optimizer_config", more="Arguments of each optimizer, by its name.")
    lr_schedule: dict[str, Any] | None = _mlx_lm(
        "lr_schedule", more="Learning rate over time: name, arguments, warmup, warmup_init."
    )
    lora_parameters: dict[str, Any] = _mlx_lm("lora_parameters", more="LoRA's rank, scale, dropout and layer keys.")
    hf_dataset: dict[str, Any] | list[dict[str, Any]] | None = _key(
        None, "Hub data sets: path, config, splits and features of each.", flag=False
    )
    prompt_feature: str | None = _key(None, "Key of the prompt in rows of completions.", flag=False)
    completion_feature: str | None = _key(None, "Key of the completion in rows of completions.", flag=False)
    text_feature: str | None = _key(None, "Key of the text in rows of text.", flag=False)
    chat_feature: str | None = _key(None, "Key of the messages in rows of chat.", flag=False)

    # pptrain's own.
    transport: Literal["auto", "loopback", "ring", "jaccl"] = _key(
        "auto", "What carries the messages; auto is the backend that mlx.launch set up, or else loopback."
    )
    lanes: Literal["auto", "single", "direction"] = _key(
        "auto", "One communication at a time on each rank, or a lane in each direction; auto is the transport's own."
    )
    stages: int | None = _key(
        None, "Number of pipeline ranks; by default one in the loopback, else one for each process.", at_least=1
    )
    layers: tuple[int, ...] | Literal["auto"] | None = _key(
        None,
        "Number of layers in each stage of all ranks, such as 10,8,8, or auto for the balanced cut that fits each "
        "machine's memory, as pptrain plan finds it; by default as even as can be.",
        read=_read_layers,
    )
    schedule: str = _key("1f1b", "Order of forwards and backwards.", choices=tuple(SCHEDULES))
    stages_per_rank: int | None = _key(
        None, "Number of stages on each rank, for --schedule interleaved; by default the schedule's own.", at_least=1
    )
    microbatches: int | None = _key(
        None, "Number of parts that a batch is cut into; by default one for each example.", at_least=1
    )
    recompute: Literal["none", "layer", "stage"] = _key(
        "none", "What a backward runs again instead of keeping it: nothing, each layer, or the whole stage."
    )
    max_grad_norm: float | None = _key(None, "Clip gradients to this global norm; by default never.", above=0)
    timeout: float = _key(
        TIMEOUT_SECONDS, "Seconds that another rank may be silent, or one wait for it may last.", above=0
    )
    check_messages: bool = _key(
        False, "Send a header before each message, and compare it and the message's checksum on arrival."
    )
    trace: str | None = _key(
        None, "Write what ran in the last step, and when, to this file, in the Chrome trace format (for Perfetto)."
    )
    checkpoint_dir: str | None = _key(None, "Write checkpoints here, from which --resume goes on; by default none.")
    checkpoint_every: int = _key(100, "Number of iterations between two checkpoints.", at_least=1)
    keep: int = _key(2, "Number of checkpoints to keep: ranks that were killed may differ by one.", at_least=2)
    resume: str | None = _key(
        None,
        "Go on from a checkpoint: auto (or no value) for the newest in --checkpoint-dir, or from the beginning where "
        "there is none; or a directory of checkpoints, or one of them. --iters counts from the beginning.",
        bare="auto",
        read=lambda value: "auto" if value is True else value,
    )
    gather: bool = _key(False, "Send every rank's part of a checkpoint to the first rank too, which then has it whole.")
    save_best: bool = _key(False, "Keep the adapters of the lowest validation loss, as best_adapters.safetensors.")
    early_stop: int | None = _key(
        None, "Stop after this many validations in a row that were no better than the best.", at_least=1
    )
    on_nonfinite: Literal["stop", "skip"] = _key(
        "stop", "What to do when a loss or gradient is no finite number: stop before the update, or leave it out."
    )
    skip_bad_rows: bool = _key(
        False, "Leave out rows of the data that cannot be used, and name them, instead of refusing to train."
    )
    demo: bool = _key(False, "Train a small model on a small data set, both made on the spot.")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(field.name, field, getattr(self, field.name))
        checks.check_optimizers(self.optimizer_config)
        checks.check_lora(self.lora_parameters)
        checks.check_services(self.report_to or "")
        if self.lr_schedule is not None:
            checks.check_learning_rate(self.lr_schedule)
        if self.hf_dataset is not None:
            checks.check_hub(self.hf_dataset, _FEATURES, is_tested=self.test)
        _check_together(self)

    def num_ranks(self, default: int) -> int:
        """How many ranks are asked for, by `stages` or by an explicit cut."""
        if self.stages is not None or not isinstance(self.layers, tuple):
            return self.stages or default
        return len(self.layers) // self.stages_on_each_rank

    @property
    def stages_on_each_rank(self) -> int:
        """As many as the schedule has."""
        return count_stages_per_rank(find_schedule(self.schedule, self.stages_per_rank))

    def namespace(self) -> SimpleNamespace:
        """What mlx-lm's functions take as `args`: a copy that they may change, without features that are not set."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        unset = {name for name in _FEATURES if values[name] is None}
        return SimpleNamespace(**copy.deepcopy({name: value for name, value in values.items() if name not in unset}))


_FIELDS = {field.name: field for field in dataclasses.fields(TrainConfig)}
_TYPES: dict[str, Any] = get_type_hints(TrainConfig)
_FEATURES = tuple(name for name in _FIELDS if name.endswith("_feature"))


def parse(argv: Sequence[str], defaults: Mapping[str, Any] | None = None) -> TrainConfig:
    """Read the command line of `pptrain train` and the YAML file that it names.

    Args:
        argv: The arguments after `train`.
        defaults: Values of keys that neither a flag nor the file gives, instead of the class's own.

    Raises:
        ConfigError: If a flag or key is unknown or has a value that it cannot have.
        SystemExit: After `--help`.
    """
    flags, unknown = build_train_parser().parse_known_args(argv)
    if unknown:
        _refuse_argument(unknown[0])
    given: dict[str, Any] = vars(flags)
    settings = {**_from_yaml(given.get("config")), **given}
    settings.setdefault("train", not settings.get("test", False))
    if settings.get("grad_checkpoint"):
        settings.setdefault("recompute", "layer")
    return TrainConfig(**{**(defaults or {}), **settings})


def build_train_parser() -> ArgumentParser:
    """The command line of `pptrain train`, built from `TrainConfig`; what is not given is not in its namespace."""
    parser = _Parser(
        prog="pptrain train",
        description="Fine-tune a language model that is cut into pipeline stages.",
        epilog=_yaml_only_help(),
        argument_default=SUPPRESS,
        allow_abbrev=False,
    )
    like_mlx_lm = parser.add_argument_group("as in mlx_lm.lora")
    own = parser.add_argument_group("pptrain's own")
    for name, field in _FIELDS.items():
        if field.metadata.get("flag", True):
            _add_flag(like_mlx_lm if name in CONFIG_DEFAULTS else own, field)
    return parser


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[:1].upper()}{message[1:]}. See pptrain train --help.")


def _add_flag(group: Any, field: dataclasses.Field[Any]) -> None:
    flag = "--" + field.name.replace("_", "-")
    names = [field.metadata["short"], flag] if "short" in field.metadata else [flag]
    if _TYPES[field.name] is bool:
        group.add_argument(*names, action=BooleanOptionalAction, help=_help(field), default=SUPPRESS)
    else:
        read = lambda text: _from_flag(flag, field, text)  # noqa: E731
        bare = {"nargs": "?", "const": field.metadata["bare"]} if "bare" in field.metadata else {}
        group.add_argument(*names, type=read, help=_help(field), **bare, **_shown(field))


def _shown(field: dataclasses.Field[Any]) -> dict[str, str]:
    """How a flag's value is shown in the help."""
    choices = checks.choices(_TYPES[field.name], field.metadata)
    return {"metavar": "{" + ",".join(choices) + "}"} if choices else {}


def _help(field: dataclasses.Field[Any]) -> str:
    default = field.metadata["default"]
    text = field.metadata["help"] if default is None else f"{field.metadata['help']} (default: {default})"
    return text.replace("%", "%%")


def _yaml_only_help() -> str:
    lines = [f"{name}: {f.metadata['help']}" for name, f in _FIELDS.items() if not f.metadata.get("flag", True)]
    return f"Keys {_YAML_ONLY}: " + " ".join(lines).replace("%", "%%")


def _refuse_argument(text: str) -> NoReturn:
    known = ["--" + name.replace("_", "-") for name, f in _FIELDS.items() if f.metadata.get("flag", True)]
    name = text.split("=")[0].removeprefix("--").replace("-", "_")
    if name in _FIELDS:
        raise ConfigError(f"{text} is no flag. {name} stands {_YAML_ONLY}, which --config names.")
    raise ConfigError(
        f"Unknown argument {text!r}.{checks.nearest(text.split('=')[0], known)} See pptrain train --help."
    )


def _from_flag(flag: str, field: dataclasses.Field[Any], text: str) -> Any:
    """The value that a flag's text stands for, by the type of its key."""
    kinds = get_args(_TYPES[field.name]) or (_TYPES[field.name],)
    read: Callable[[Any], Any] = field.metadata.get("read") or next(
        (kind for kind in (int, float) if kind in kinds), str
    )
    value = _read_or_keep(read, text)
    _check(flag, field, value)
    return value


def _from_yaml(path: str | None) -> dict[str, Any]:
    """The settings of a file; as in mlx-lm, a key without a value is a key that is not there."""
    if path is None:
        return {}
    settings = _load_yaml(path)
    return {name: _from_yaml_value(path, name, value) for name, value in settings.items() if value is not None}


def _load_yaml(path: str) -> dict[Any, Any]:
    try:
        loaded: Any = yaml.load(Path(path).read_text(encoding="utf-8"), yaml_loader)
    except OSError as error:
        raise ConfigError(f"[--config] Cannot read {path}: {error.strerror}. Give the path of a YAML file.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"[{path}] This is no YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(loaded, dict | NoneType):
        raise ConfigError(f"[{path}] Expected a mapping of keys to values, but found {type(loaded).__name__}.")
    return loaded or {}


def _from_yaml_value(path: str, name: Any, value: Any) -> Any:
    if name not in _FIELDS:
        raise ConfigError(
            f"[{path}] Unknown key {name!r}.{checks.nearest(str(name), _FIELDS)} See pptrain train --help."
        )
    value = _read_or_keep(_FIELDS[name].metadata.get("read", lambda same: same), value)
    _check(f"[{path}] {name}", _FIELDS[name], value)
    return value


def _read_or_keep(read: Callable[[Any], Any], value: Any) -> Any:
    """A value as `read` understands it, or as it is, for the check of its type to refuse."""
    try:
        return read(value)
    except (TypeError, ValueError, KeyError, ArithmeticError):
        return value


def _check(where: str, field: dataclasses.Field[Any], value: Any) -> None:
    checks.check(where, value, _TYPES[field.name], field.metadata)


def _check_together(config: TrainConfig) -> None:
    """Refuse values that are right alone and wrong together."""
    if not config.train and not config.test:
        raise ConfigError("Neither train nor test is asked for, so there is nothing to do. Give --train or --test.")
    each = config.stages_on_each_rank
    if config.layers == "auto" and each > 1:
        raise ConfigError(
            f"--layers auto cuts for schedules of one stage a rank, and {config.schedule} has {each}. List the layers, "
            "or leave out --layers for an even cut."
        )
    if isinstance(config.layers, tuple):
        _check_layers(config, config.layers, each)
    if config.microbatches is not None and config.microbatches > config.batch_size:
        asked = f"a batch of {config.batch_size} into {config.microbatches} microbatches"
        raise ConfigError(f"Cannot cut {asked}. Use --microbatches between 1 and {config.batch_size}.")
    if config.grad_checkpoint and config.recompute == "none":
        raise ConfigError("grad_checkpoint asks for --recompute layer, but recompute is none. Give one of the two.")
    _check_checkpoints(config)
    if config.resume_adapter_file is not None and not Path(config.resume_adapter_file).is_file():
        raise ConfigError(f"There is no file {config.resume_adapter_file}, which --resume-adapter-file names.")


def _check_checkpoints(config: TrainConfig) -> None:
    if config.resume == "auto" and config.checkpoint_dir is None:
        raise ConfigError("--resume auto looks in --checkpoint-dir, which is not given. Give it, or --resume DIR.")
    for name in ("save_best", "early_stop"):
        if getattr(config, name) and config.val_batches == 0:
            raise ConfigError(f"{name} looks at the validation loss, but val_batches is 0. Give --val-batches.")


def _check_layers(config: TrainConfig, layers: tuple[int, ...], each: int) -> None:
    counts, entries = ",".join(map(str, layers)), len(layers)
    if config.stages is not None and entries != config.stages * each:
        expected = "one a stage" if each == 1 else f"{config.stages * each}, {each} for each"
        raise ConfigError(f"--layers {counts} has {entries} entries for --stages {config.stages}. Give {expected}.")
    if entries % each:
        raise ConfigError(f"--layers {counts} has {entries} entries. Give {each} for each rank of {config.schedule}.")
