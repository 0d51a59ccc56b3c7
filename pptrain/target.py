"""What `pptrain validate` is asked about: a name, a file or a class, made into a tiny model with random weights."""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import os
import pkgutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, cast
from urllib.parse import urlsplit
from urllib.request import getproxies

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
from mlx_lm.utils import MODEL_ARCHITECTURE_REMAPPING, MODEL_REMAPPING

from pptrain.errors import ConfigError
from pptrain.invent import invented_model
from pptrain.microbatch import kept_random_state
from pptrain.pattern import FEWEST, kinds_of, layers_to_show
from pptrain.quantization import (
    MODES,
    Quantization,
    as_converted,
    fitted,
    named_in_vain,
    quantization_of,
    quantize,
    some,
)
from pptrain.shrink import Config, count_layers_within, shrunk, with_defaults
from pptrain.sound import refuse_broken, refuse_misread, refuse_misshapen

_PATIENCE_SECONDS = 5.0

_DEPTH = 24
"""Layers in which a pattern is looked for where there is no real config."""


def _to_4_bits(model: nn.Module) -> Quantization:
    return as_converted(model, MODES["affine"])


@dataclass(frozen=True, slots=True)
class Target:
    """A model by name, and how to make it; made twice from one seed it is the same."""

    name: str
    make: Callable[[], nn.Module]
    config: Config = field(default_factory=dict[str, Any])
    """What it was made from; it says how the model is quantized."""
    is_full_size: bool = False
    convert: Callable[[nn.Module], Quantization] = _to_4_bits
    """How it is quantized where its config says nothing of that."""
    real: Callable[[], nn.Module] | None = None
    """The model of its config's real sizes, if this is not that itself."""

    def build(self, seed: int = 0) -> nn.Module:
        """A fresh model with random weights."""
        mx.random.seed(seed)
        return self.make()

    def quantize(self, model: nn.Module) -> list[str]:
        """Quantize a model of this target's, in place.

        Returns:
            In what that is not what the config says, because of the tiny widths.
        """
        said = quantization_of(self.config)
        if said is None:
            quantize(model, fitted(model, self.convert(model))[0])
            return []
        vain = self._named_in_vain(model, said)
        fits, notes = (said, list[str]()) if self.is_full_size else fitted(model, said)
        quantize(model, fits)
        return [*notes, *([f"no module {some(vain)}, which the config's quantization names"] if vain else [])]

    def _named_in_vain(self, model: nn.Module, said: Quantization) -> list[str]:
        """Modules that a config's quantization names and that not even the model of its real sizes has."""
        vain = named_in_vain(model, said)
        if not vain or self.real is None:
            return vain
        with kept_random_state():
            return named_in_vain(self.real(), said)


def every_name() -> list[str]:
    """The name of every model module of the installed mlx-lm, in alphabetical order."""
    names = sorted(module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__))
    return [name for name in names if _has_model(name)]


def find_target(
    text: str, num_layers: int | None = None, full_size: bool = False, config: Path | None = None
) -> Target:
    """What a user named: a directory, a `config.json`, `module:Class`, a model type, or a name on the hub.

    Args:
        text: The name.
        num_layers: Of the tiny model; None for as many as show its pattern of layers twice.
        full_size: Whether a config's sizes stay as they are.
        config: The `config.json` that a `module:Class` is called with; None for no arguments.

    Raises:
        ConfigError: If there is no such thing, or it needs a config.
    """
    path = Path(text)
    if os.path.isdir(path):  # unlike the path's own method, it takes any name
        path = path / "config.json"
    if path.suffix == ".json":
        return _of_config(text, _read(path), num_layers, full_size)
    if is_class(text):
        made = _class(text)
        if config is None:
            return _without_arguments(text, made)
        return _from_config(text, partial(_called, made, text), _read(config), num_layers, full_size)
    if _is_type(text):
        return of_type(text, num_layers)
    if "/" in text:
        return _of_config(text, _read(_downloaded(text)), num_layers, full_size)
    raise ConfigError(
        f"[target] {text!r} is no model directory, no config.json, no model type of mlx-lm, and no name on the hub. "
        "Expected for example `qwen3_moe`, `mlx-community/Qwen3-4B-4bit`, `path/config.json` or `my.module:Model`. "
        "Use --all for every model that mlx-lm has."
    )


def of_type(name: str, num_layers: int | None = None) -> Target:
    """A model module of mlx-lm by its model type, with tiny values for its arguments."""

    def make(count: int) -> nn.Module:
        return invented_model(_module(name), count)

    # Not before it is built: what a module needs may not be installed, and that is a verdict.
    count = cache(lambda: num_layers or len(_layers_to_show(lambda layers: make(len(layers)), _DEPTH)))
    return Target(name, lambda: make(count()))


def _of_config(name: str, config: Config, num_layers: int | None, full_size: bool) -> Target:
    model_type = _type_of(config)
    if not isinstance(model_type, str):
        said = "no model_type" if model_type is None else f"{model_type!r} as its model_type"
        raise ConfigError(f"[target] The config of {name} has {said}. Expected one, as `llama`. Add it.")
    try:
        module = _module(model_type)
    except ImportError:  # of what it needs, which is a verdict
        return replace(of_type(model_type), name=name)
    if not hasattr(module, "Model"):
        raise ConfigError(
            f"[target] {name} says model_type {model_type!r}, which is a part of mlx-lm and no model. "
            "Expected the model_type of a model. Correct it."
        )
    return _from_config(
        name,
        lambda config: module.Model(module.ModelArgs.from_dict(config)),
        with_defaults(config, _arguments_of),
        num_layers,
        full_size,
        lambda: invented_model(module, FEWEST),
    )


def _type_of(config: Mapping[str, Any]) -> Any:
    """The model type that a config says, or that mlx-lm takes for its architecture."""
    model_type, architectures = config.get("model_type"), config.get("architectures") or ()
    types: Mapping[tuple[str, Any], str] = MODEL_ARCHITECTURE_REMAPPING
    names = [architectures] if isinstance(architectures, str) else architectures
    return next((found for name in names if (found := types.get((str(model_type), name)))), model_type)


def _arguments_of(config: Mapping[str, Any]) -> type | None:
    """The argument class of a config's module of mlx-lm; None if there is none."""
    name = str(_type_of(config))
    with suppress(ImportError, ConfigError):
        return getattr(_module(name), "ModelArgs", None) if _is_type(name) else None
    return None


def _from_config(
    name: str,
    build: Callable[[Config], nn.Module],
    config: Config,
    num_layers: int | None,
    full_size: bool,
    made_up: Callable[[], nn.Module] | None = None,
) -> Target:
    """What is built from a config of its own, so that a constructor may change it.

    Args:
        made_up: Makes a model of the same kind with made-up values, if there is a way.
    """

    def make(layers: Sequence[int]) -> nn.Module:
        return build(shrunk(deepcopy(config), layers))

    def quantized(layers: Sequence[int]) -> nn.Module:
        model = make(layers)
        with suppress(Exception):  # of which the variant that quantizes will say what it is
            Target(name, lambda: model, config).quantize(model)
        return model

    def real() -> nn.Module:
        return build(deepcopy(config))

    with suppress(ValueError):  # of weights that mlx-lm does not read; the variant that quantizes will say so
        quantization_of(config)
    refuse_broken(name, real, made_up)
    if full_size:
        return Target(name, real, config, is_full_size=True)
    known = count_layers_within(config)
    depth, is_quantized = known or _DEPTH, "quantization" in config
    layers = range(num_layers) if num_layers else _layers_to_show(quantized if is_quantized else make, depth)[:depth]
    if is_quantized:  # by names with numbers of layers, which stay what they are
        layers = range(len(layers))
    refuse_misread(name, lambda: make(layers), len(layers), known)
    refuse_misshapen(name, lambda: make(layers), real)
    return Target(name, lambda: make(layers), config, real=real)


def _layers_to_show(make: Callable[[Sequence[int]], nn.Module], depth: int) -> Sequence[int]:
    """The layers that show the pattern that a model has at some depth."""
    try:
        with kept_random_state():
            return layers_to_show(kinds_of(make(range(depth))))
    except Exception:
        # A model's own code may raise anything, and will again with few layers, where it is looked at.
        return range(FEWEST)


def is_class(text: str) -> bool:
    """Whether a target is a `module:Class`."""
    return ":" in text and not text.endswith(".json") and not os.path.isdir(text)


def refuse_ignored(texts: Sequence[str], num_layers: int | None, full_size: bool, config: Path | None) -> None:
    """Refuse options that some target has no use for.

    Raises:
        ConfigError: If a class has no config to change the size of, a config has no class, or there are no real sizes.
    """
    if full_size and num_layers is not None:
        raise ConfigError(
            f"[target] --full-size keeps the layers of the config, and --num-layers {num_layers} asks for others. "
            "Expected one of them. Leave the other out."
        )
    types = [text for text in texts if not os.path.exists(text) and not is_class(text) and _is_type(text)]
    if full_size and types:
        raise ConfigError(
            f"[target] --full-size cannot be followed by {types[0]}, a model type, which has no real sizes. Expected "
            "a config.json, a model directory or a name on the hub. Name one, or leave it out."
        )
    classes = [text for text in texts if is_class(text)]
    if config is not None and not classes:
        raise ConfigError(
            f"[target] --config {config} is for `module:Class`, and there is none in {', '.join(texts)}. "
            "Name a class, or give the config.json itself as the target."
        )
    if config is None and classes and (num_layers is not None or full_size):
        option = "--full-size" if full_size else f"--num-layers {num_layers}"
        raise ConfigError(
            f"[target] {option} cannot be followed by {classes[0]}, which is called without arguments. Expected a "
            "config whose sizes it says. Add --config FILE (a config.json), or leave it out."
        )


def _class(text: str) -> Any:
    """A class or function that makes a model; looked for in the current directory too, as `python -m` does."""
    module, _, name = text.partition(":")
    if not module.strip(".") or module.startswith(".") or not name:
        raise ConfigError(
            f"[target] {text!r} lacks a module or a class. Expected `my.module:Class`. Give both in full."
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:
        # A user's module may raise anything when it is imported.
        raise ConfigError(
            f"[target] {text}: {type(error).__name__}: {error}. Expected `module:Class`, importable from here, that "
            "makes a model. Check the path."
        ) from error


def _without_arguments(text: str, made: Any) -> Target:
    """Called once here, where a constructor that needs arguments is still the user's mistake and no verdict."""
    try:
        with kept_random_state():
            model: object = made()
    except Exception as error:
        # A model's own code may raise anything.
        raise ConfigError(
            f"[target] {text} was called without arguments and raised {type(error).__name__}: {error}. Expected a "
            "class that takes none, or a config to call it with. Add --config FILE (a config.json)."
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"[target] {text} made a {type(model).__name__}. Expected an mlx.nn.Module. Name the class of the model."
        )
    return Target(text, made)


def _called(made: Any, text: str, config: Config) -> nn.Module:
    """A model by its class, from the argument class that its module has, or else from the dict."""
    homes = [sys.modules.get(str(name)) for name in (getattr(made, "__module__", None), text.partition(":")[0])]
    classes = [vars(home)["ModelArgs"] for home in homes if home is not None and "ModelArgs" in vars(home)]
    return made(classes[0].from_dict(config) if classes else config)


def _module_name(model_type: str) -> str:
    names: Mapping[str, str] = MODEL_REMAPPING
    return names.get(model_type, model_type)


def _module(model_type: str) -> ModuleType:
    said = io.StringIO()
    try:
        with redirect_stdout(said):
            return importlib.import_module(f"mlx_lm.models.{_module_name(model_type)}")
    except SystemExit as error:
        why = said.getvalue().strip() or f"mlx_lm.models.{model_type} needs a package that is not installed here"
        raise ImportError(why) from error
    except ImportError as error:
        raise ConfigError(f"[target] The installed mlx-lm has no model type {model_type!r}: {error}.") from error


def _is_type(text: str) -> bool:
    name = _module_name(text)  # a name with a dot, as many on the hub have, is looked for within another module
    return "." not in name and importlib.util.find_spec(f"mlx_lm.models.{name}") is not None


def _has_model(name: str) -> bool:
    spec = importlib.util.find_spec(f"mlx_lm.models.{name}")
    source = Path(spec.origin).read_text() if spec and spec.origin else ""
    return "\nclass Model(" in source


def _read(path: Path) -> Config:
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"[target] Cannot read {path}: {error}. Expected a model's config.json. Check the path and the file."
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(
            f"[target] {path} holds a {type(config).__name__}: {str(config)[:40]}. Expected an object, as a model's "
            "config.json is. Check the path."
        )
    return cast(Config, config)


def _downloaded(name: str) -> Path:
    from huggingface_hub import constants, hf_hub_download

    is_there = _answers(constants.ENDPOINT)
    try:
        return Path(hf_hub_download(name, "config.json", local_files_only=not is_there))
    except (OSError, ValueError) as error:
        where = "on the hub" if is_there else f"in the cache, and {constants.ENDPOINT} does not answer"
        raise ConfigError(
            f"[target] There is no config.json of {name} {where}: {str(error).rstrip('.')}. Expected a model's name on "
            "the hub. Check the name and the network, or give a config.json."
        ) from error


def _answers(url: str) -> bool:
    """Whether a server takes connections; asked before the hub's client, which tries again for half a minute."""
    if getproxies():
        return True
    address = urlsplit(url)
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
        with socket.create_connection((address.hostname or "", port), timeout=_PATIENCE_SECONDS):
            return True
    except OSError:
        return False
