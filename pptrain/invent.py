"""A tiny model of an mlx-lm module, with made-up values for its arguments."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn

from pptrain.model import find_slots
from pptrain.shrink import Config, argument_classes, completions, tiny_config

TINY = 8_000_000
"""Parameters; a model with more is not what shrinking is to give."""


def _hadamard_pack(num_layers: int) -> Config:
    paths = [f"model.layers.{layer}.mlp.down_proj" for layer in range(num_layers)]
    return {
        "tensor_namespace": "mlx-vlm-qwen3_5",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [{"path": path, "block": 512, "embedding": False, "dtype": "float16"} for path in paths],
        "intermediate_size": 512,
        "num_experts": 0,
    }


_EXCEPTIONS: Mapping[str, Callable[[int], Config]] = {
    # Its forward writes to the logits of tokens by their real numbers, which MLX does not check.
    "phi3small": lambda num_layers: {"vocab_size": 100352},
    # Its config lists the modules whose weights are packed, and a pack has these bits and such widths or is refused.
    "prism_hadamard_qwen35": _hadamard_pack,
}
"""Values, by the number of layers, that a module needs and that nothing in its argument class says."""


def invented_model(module: ModuleType, num_layers: int) -> nn.Module:
    """The first tiny model that can be made and run.

    Raises:
        Exception: Whatever the model raises, if none can: the first error of one that could be made.
    """
    errors = list[tuple[bool, Exception]]()
    for config in _invented_configs(module, num_layers):
        is_made = False
        try:
            model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
            _refuse_large(model)
            is_made = True
            model(mx.zeros((1, 8), mx.int32))
            return model
        except Exception as error:
            # A model's own code may raise anything here, and the next config may do.
            errors.append((is_made, error))
    raise next((error for is_made, error in errors if is_made), errors[-1][1])


def _invented_configs(module: ModuleType, num_layers: int) -> Iterator[Config]:
    fields = {field.name for field in dataclasses.fields(module.ModelArgs)}
    inner_classes = argument_classes(module) if "text_config" in fields else [module.ModelArgs]
    for count in range(1, len(completions(module, num_layers)) + 1):
        for inner in inner_classes:
            home = importlib.import_module(inner.__module__)
            completed = {key: value for more in completions(home, num_layers)[:count] for key, value in more.items()}
            completed |= _EXCEPTIONS.get(module.__name__.rsplit(".", 1)[-1], lambda num_layers: {})(num_layers)
            text = tiny_config(home, inner, num_layers, completed)
            outer = tiny_config(module, module.ModelArgs, num_layers, completed)
            yield {**outer, "text_config": text} if "text_config" in fields else text


def _refuse_large(model: nn.Module) -> None:
    size = count_parameters(model)
    if size > TINY:
        raise ValueError(f"shrunk to {size} parameters, which is not tiny")


def count_parameters(model: nn.Module) -> int:
    """Elements of all parameters; nothing is evaluated."""
    return sum(slot.array.size for slot in find_slots(model).values())
