"""A model as its config describes it, or as its files do: shapes without data, so that it can be looked at anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.utils import (
    _get_classes,  # pyright: ignore[reportPrivateUsage]
    load_model,
)

from pptrain.errors import ModelError
from pptrain.microbatch import kept_random_state
from pptrain.quantization import quantization_of, quantize

_DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}


def outline(path: Path, trust_remote_code: bool = False) -> nn.Module:
    """The model of a directory, with or without weights, or of a `config.json`; no weight is read.

    Raises:
        ModelError: If there is no such file, or mlx-lm has no such model.
    """
    directory = path if path.is_dir() else path.parent
    try:
        if path.is_dir() and any(path.glob("model*.safetensors")):
            return load_model(path, lazy=True, trust_remote_code=trust_remote_code)[0]
        config = json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
        return from_config(config)
    except OSError as error:
        raise ModelError(
            f"[model] Cannot read {path}: {error.strerror}. Expected a model's directory, or its config.json. In "
            f"{directory} there is none. Check --model."
        ) from error
    except Exception as error:  # whatever mlx-lm or a config raises: the cause is in the message
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ModelError(
            f"[model] No model can be made of {path}: {reason}. Expected the config.json of a model that mlx-lm knows. "
            "Check --model."
        ) from error


def from_config(config: dict[str, Any]) -> nn.Module:
    """The model of a config, in the dtype and quantization that it names; its arrays are never computed."""
    kind, arguments = _get_classes(config)
    text = config.get("text_config", {})
    dtype = next((c[key] for c in (config, text) for key in ("dtype", "torch_dtype") if c.get(key)), "bfloat16")
    with kept_random_state():
        model: Any = kind(arguments.from_dict(config))
        if getattr(model, "tie_word_embeddings", None) is None and config.get("tie_word_embeddings", False):
            _drop_head(model)
        model.set_dtype(_DTYPES[dtype])
        quantization = quantization_of(config)
        if quantization is not None:
            quantize(model, quantization)
        # One node for each array, instead of a chain of random draws.
        model.update(tree_map(lambda array: mx.zeros(array.shape, array.dtype), model.parameters()))
    return model


def _drop_head(model: Any) -> None:
    """As `sanitize` does for models that see from their weights that the head is the embedding."""
    if "lm_head" in model and hasattr(model, "sanitize"):
        model.sanitize({})
