"""From a config to what is trained: the base model, its adapters or unfrozen layers, and the optimizer.

All of it is mlx-lm's and MLX's own, called in the order of `mlx_lm.lora`, so that what is drawn from NumPy's and MLX's
random generators is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import build_schedule, linear_to_lora_layers, load_adapters
from mlx_lm.utils import hf_repo_to_path, load

from pptrain.config import TrainConfig
from pptrain.errors import ConfigError, ModelError
from pptrain.model import find_layers, trainable_names, unmatched_keys

_OPTIMIZERS = {
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "muon": optim.Muon,
    "sgd": optim.SGD,
    "adafactor": optim.Adafactor,
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model from disk, its weights lazy."""

    model: nn.Module
    tokenizer: Any
    config: dict[str, Any]
    path: Path


def load_base(config: TrainConfig, directory: Path | None = None) -> Loaded:
    """Load the model that a run starts from, in its mode; no weight is read before somebody evaluates it.

    Args:
        config: Names the model.
        directory: Where it lies, if not where its name says.

    Raises:
        ModelError: If there is no such model, or mlx-lm cannot load it.
    """
    np.random.seed(config.seed)
    trust, where = config.trust_remote_code, str(directory or config.model)
    try:
        model, tokenizer, model_config = load(  # pyright: ignore[reportAssignmentType]
            where,
            tokenizer_config={"trust_remote_code": trust},
            lazy=True,
            return_config=True,
            trust_remote_code=trust,
        )
        path = Path(where) if Path(where).exists() else hf_repo_to_path(where)
    except Exception as error:  # whatever mlx-lm, transformers or the hub raise: the cause is in the message
        raise cannot_load(config.model, error) from error
    model.train(config.train)  # whoever looks at it sees the forward that will run; mlx-lm gives that of evaluation
    return Loaded(model, tokenizer, model_config, path)


def cannot_load(model: str, error: Exception) -> ModelError:
    """What is said of a model that cannot be had."""
    return ModelError(
        f"[model] Cannot load {model}: {type(error).__name__}: {' '.join(str(error).split())}. Expected a "
        "directory with config.json and safetensors files, or the name of a model on the hub. Check --model."
    )


def prepare_training(model: nn.Module, config: TrainConfig) -> None:
    """Freeze the model and make trainable what the run trains: adapters, or whole layers.

    Raises:
        ConfigError: If LoRA keys match nothing, or more layers are asked for than there are.
        ModelError: If nothing would train.
    """
    mx.random.seed(config.seed)
    model.freeze()
    layers = find_layers(model)
    if config.num_layers > len(layers):
        raise ConfigError(
            f"[num-layers] {config.num_layers} layers are to be trained, but the model has {len(layers)}. "
            f"Use --num-layers between 1 and {len(layers)}, or -1 for all."
        )
    if config.fine_tune_type == "full":
        for layer in layers[-max(config.num_layers, 0) :]:
            layer.unfreeze()
    else:
        _check_lora_keys(model, layers, config.lora_parameters.get("keys"))
        linear_to_lora_layers(
            model, config.num_layers, config.namespace().lora_parameters, use_dora=config.fine_tune_type == "dora"
        )
    if config.resume_adapter_file is not None:
        _load_adapter_file(model, Path(config.resume_adapter_file))
    if not trainable_names(model):
        raise ModelError(
            f"[model] Nothing trains with --fine-tune-type {config.fine_tune_type}: the layers have no module that can "
            "be adapted. Expected at least one linear layer. Try --fine-tune-type full."
        )


def _check_lora_keys(model: nn.Module, layers: Sequence[nn.Module], keys: Sequence[str] | None) -> None:
    missing = unmatched_keys([model, *layers], keys or ())
    if missing:
        linear = (nn.Linear, nn.QuantizedLinear)
        known = sorted({name for layer in layers for name, m in layer.named_modules() if isinstance(m, linear)})
        raise ConfigError(
            f"[lora_parameters] keys {', '.join(missing)} match no module, so they would train nothing. "
            f"Expected names within a layer: {', '.join(known)}."
        )


def _load_adapter_file(model: nn.Module, path: Path) -> None:
    weights: dict[str, mx.array] = mx.load(str(path))  # type: ignore[assignment]
    leaves: dict[str, mx.array] = dict(tree_flatten(model.parameters()))  # pyright: ignore[reportArgumentType]
    known = {name: array.shape for name, array in leaves.items()}
    wrong = [name for name, array in weights.items() if known.get(name) != array.shape]
    if wrong:
        raise ConfigError(
            f"[resume-adapter-file] {path} has {len(wrong)} of {len(weights)} tensors that the model has not in this "
            f"shape, first {wrong[0]} {tuple(weights[wrong[0]].shape)}. Expected adapters of this model, made with the "
            "same fine-tune type, number of layers and LoRA parameters."
        )
    model.load_weights(list(weights.items()), strict=False)


def load_trained(model: nn.Module, adapter_path: str) -> None:
    """Put trained adapters on, for `--test` without training; an empty path means the model as it is.

    Raises:
        ConfigError: If they are not there or do not fit.
    """
    if not adapter_path:
        return
    try:
        load_adapters(model, adapter_path)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(
            f'[adapter-path] Cannot load adapters from {adapter_path}: {error}. Give the directory of a run, or "" to '
            "test the model without adapters."
        ) from error


def make_optimizer(config: TrainConfig) -> optim.Optimizer:
    """MLX's own optimizer, with mlx-lm's learning-rate schedule."""
    rate = build_schedule(config.lr_schedule) if config.lr_schedule else config.learning_rate
    name = config.optimizer
    try:
        return _OPTIMIZERS[name](learning_rate=rate, **config.optimizer_config.get(name, {}))
    except TypeError as error:
        raise ConfigError(f"[optimizer_config] {name}: {error}. Give arguments that mlx.optimizers takes.") from error
