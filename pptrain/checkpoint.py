"""What a run leaves behind: adapters in mlx-lm's own format, or a whole model directory, with whole-model names.

Each rank holds the parameters of its own stage; the first rank writes, so what the others trained is handed down to it,
neighbour by neighbour. Files are written beside their place and renamed, so that a kill leaves the one before whole.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import save, save_config

from pptrain.durable import write_whole
from pptrain.errors import ConfigError, SaveError
from pptrain.model import Slot
from transports import Task, Transport

ADAPTERS = "adapters.safetensors"
BEST = "best_adapters.safetensors"
"""Those of the lowest validation loss."""


def gather(transport: Transport, slots: Mapping[str, Slot], held: Sequence[Sequence[str]]) -> Task[dict[str, mx.array]]:
    """Hand every parameter down to the first rank.

    Args:
        transport: This rank's.
        slots: Where parameters live; those of other ranks give the shape and dtype.
        held: The parameters that each rank keeps the truth of.

    Returns:
        On the first rank all of them, elsewhere those of this rank and the ranks above.
    """
    rank = transport.rank
    arrays = {name: slots[name].array for name in held[rank]}
    for name in [name for names in held[rank + 1 :] for name in names]:
        template = slots[name].array
        incoming = transport.receive(template.shape, template.dtype, rank + 1, name)
        yield transport.arrive(incoming)
        arrays[name] = incoming.array
    if rank:
        for name, array in arrays.items():
            yield transport.send(array, rank - 1, name)
    yield transport.flush()
    return arrays


def save_adapters(
    directory: Path, arrays: Mapping[str, mx.array], iteration: int | None = None, name: str = ADAPTERS
) -> Path:
    """Write the trained parameters as mlx-lm does: the newest, and with an iteration also a numbered copy.

    Returns:
        The file that was asked for.

    Raises:
        SaveError: If it cannot be written; what was there before stays.
    """
    newest = _write(directory / name, arrays)
    return newest if iteration is None else _write(directory / f"{iteration:07d}_{ADAPTERS}", arrays)


def save_adapter_config(directory: Path, config: Mapping[str, Any]) -> None:
    """Write `adapter_config.json`, which tells `mlx_lm.load` how the adapters were put on.

    Raises:
        ConfigError: If nothing can be written there; this is the first thing that a run writes.
    """
    with to_adapter_path(directory):
        directory.mkdir(parents=True, exist_ok=True)
        save_config(dict(config), directory / "adapter_config.json")


@contextmanager
def to_adapter_path(directory: Path) -> Generator[None]:
    """Say of a file that cannot be written before training that it is a matter of the directory that was asked for."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"[adapter-path] Cannot write to {directory}: {error.strerror}. Expected a directory, or a path where one "
            "can be made. Change --adapter-path."
        ) from error


def save_whole_model(
    directory: Path,
    source: Path,
    slots: Mapping[str, Slot],
    arrays: Mapping[str, mx.array],
    parts: tuple[Any, Any, Any],
) -> None:
    """Write a model directory that `mlx_lm.load` takes; what did not train is read from the source.

    Args:
        directory: Where to.
        source: The directory that the model was loaded from.
        slots: Where parameters live.
        arrays: What was trained, from all ranks.
        parts: Model, tokenizer and config.

    Raises:
        SaveError: If it cannot be written.
    """
    for name, array in arrays.items():
        slots[name].put(array)
    model, tokenizer, config = parts
    with saving(directory):
        try:
            save(directory, str(source), model, tokenizer, dict(config), donate_model=False)
        except RuntimeError as error:  # as MLX says it where it writes by itself
            raise OSError(str(error)) from error


@contextmanager
def saving(path: Path) -> Generator[None]:
    """Say where a disk was full, or what else was in the way, when something that was trained was written."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise SaveError(
            f"[adapter-path] Cannot write {path}: {reason}. Expected room on a disk that can be written to; what was "
            "written before is as it was. Make room."
        ) from error


def _write(path: Path, arrays: Mapping[str, mx.array]) -> Path:
    with saving(path):
        write_whole(path, lambda file: mx.save_safetensors(file, dict(arrays)))
    return path
