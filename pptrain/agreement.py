"""Before anything runs, all ranks compare what they were started with, and refuse to go on if it differs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from pptrain.config import TrainConfig
from pptrain.errors import RanksDisagree
from transports import Task, Transport

Settings = dict[str, str]
"""A run's settings by the flag, without its dashes, that sets them."""

# What may differ between ranks: where files lie, and who writes reports. The contents of model and data are compared.
_PLACES = ("checkpoint_dir", "resume")
_LOCAL = {
    *("model", "data", "adapter_path", "resume_adapter_file", "config", "report_to", "project_name", "transport"),
    *_PLACES,
}
# What may differ between a checkpoint and the run that goes on from it: none of these changes what is trained.
_FREE = {
    *("layers", "stages", "schedule", "stages-per-rank", "iters", "recompute", "grad-checkpoint", "timeout"),
    *("check-messages", "save-every", "steps-per-report", "train", "test", "test-batches", "demo", "gather", "keep"),
    *("clear-cache-threshold", "trust-remote-code", "checkpoint-dir", "checkpoint-every", "resume", "save-best"),
    *("early-stop", "on-nonfinite", "trace", "lanes"),
}
_CAPACITY = 64 * 1024


def settings_of(config: TrainConfig, model: Path, data_digest: str, layers: Sequence[int]) -> Settings:
    """The settings that have to be the same on every rank.

    Args:
        config: The run.
        model: The model's directory; its config, and names and sizes of its weight files are compared.
        data_digest: Of the processed rows.
        layers: The cut.
    """
    values = {name: value for name, value in vars(config.namespace()).items() if name not in _LOCAL}
    settings = {
        name.replace("_", "-"): json.dumps(value, sort_keys=True, default=str) for name, value in values.items()
    }
    settings |= {"layers": ",".join(map(str, layers)), "stages": str(len(layers))}
    settings |= {"model": model_digest(model), "data": data_digest}
    for name in _PLACES:  # a path may differ, but not whether there is one
        settings[name.replace("_", "-")] = {None: "none", "auto": "auto"}.get(getattr(config, name), "a path")
    if config.resume_adapter_file:
        settings["resume-adapter-file"] = file_digest(Path(config.resume_adapter_file))
    return settings | {name: version(name) for name in ("mlx", "mlx-lm", "pptrain")}


def fingerprint_of(settings: Settings, data_digest: str) -> Settings:
    """The settings that a checkpoint and the run that goes on from it must have in common.

    Args:
        settings: Of `settings_of`.
        data_digest: Of the rows that training draws from.
    """
    return {name: value for name, value in settings.items() if name not in _FREE} | {"data": data_digest}


def model_digest(directory: Path) -> str:
    """A digest of a model's config, and of the names and sizes of its weight files: weights are not read for this."""
    config = (directory / "config.json").read_bytes()
    weights = sorted((f.name, f.stat().st_size) for f in directory.glob("model*.safetensors"))
    return hashlib.sha256(config + repr(weights).encode()).hexdigest()[:12]


def file_digest(path: Path) -> str:
    """A digest of a file's contents."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def exchange(transport: Transport, value: Any) -> Task[list[Any]]:
    """Tell every rank a value that JSON has, of at most 64 KB, and hear theirs; in the order of ranks."""
    mine = np.frombuffer(json.dumps(value).encode(), np.uint8)
    assert mine.size <= _CAPACITY
    table = np.zeros((transport.world_size, _CAPACITY), np.int32)
    table[transport.rank, : mine.size] = mine
    # Each row is filled by one rank and zero on the others: the sum is everybody's.
    gathered = transport.all_sum(mx.array(table), "settings")
    yield gathered
    rows = np.asarray(gathered.array).astype(np.uint8)
    return [json.loads(row.tobytes().rstrip(b"\0")) for row in rows]


def agree(transport: Transport, settings: Mapping[str, str]) -> Task[None]:
    """Compare settings with every other rank.

    Raises:
        RanksDisagree: On every rank, naming each setting that differs by its flag, with the values.
    """
    text = json.dumps(settings)
    everybody = yield from exchange(transport, settings if len(text) <= _CAPACITY else _shortened(settings))
    found = differences(everybody)
    if found:
        raise RanksDisagree(
            "[start] Ranks were started with different settings:\n  " + "\n  ".join(found) + "\nExpected the same on "
            "every rank. Start all of them with the same command, and give each the same model and data."
        )


def differences(everybody: Sequence[Mapping[str, str]]) -> list[str]:
    """One line for each setting that is not the same everywhere: `seed: rank 0 has 0, rank 1 has 7`."""
    names = sorted(set[str]().union(*everybody))
    lines = list[str]()
    for name in names:
        values = [settings.get(name, "none") for settings in everybody]
        if len({_short(value) for value in values}) > 1:
            lines.append(f"{name}: " + ", ".join(f"rank {rank} has {value}" for rank, value in enumerate(values)))
    return lines


def _shortened(settings: Mapping[str, str]) -> Settings:
    return {name: _short(value) for name, value in settings.items()}


def _short(value: str) -> str:
    """A value, or the digest of a long one, which is its own digest: a rank may have shortened its values already."""
    return value if len(value) < 80 else hashlib.sha256(value.encode()).hexdigest()
