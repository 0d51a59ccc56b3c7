"""Checkpoints on disk: which files make one, how they are written, and what is refused when they are read.

    DIR/0000012-of-3/rank0.safetensors    what rank 0 updates: its parameters, and what the optimizer holds for them
                     rank0.json           its manifest, written last: a checksum of that file, and where the run stood

A part is whole when its manifest is there. A rank reads whichever parts hold what it needs, whoever wrote them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import mlx.core as mx

from pptrain.agreement import Settings
from pptrain.durable import At, digest_of, nothing, write_whole
from pptrain.errors import CheckpointError
from pptrain.progress import Progress

FORMAT = "pptrain checkpoint 1"
PARAMETERS, OPTIMIZER = "parameters.", "optimizer."
"""How the names of arrays begin; a whole-model name follows."""


@dataclass(frozen=True, slots=True, order=True)
class Name:
    """A checkpoint of a directory, and that directory's folder of it."""

    iteration: int
    num_ranks: int

    def __str__(self) -> str:
        return f"{self.iteration:07d}-of-{self.num_ranks}"

    @staticmethod
    def of(folder: Path) -> Name | None:
        """The checkpoint that a folder holds, by its name."""
        found = re.fullmatch(r"(\d{7,})-of-([1-9]\d*)", folder.name)
        return Name(int(found[1]), int(found[2])) if found else None


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one rank wrote into a checkpoint."""

    iteration: int
    num_ranks: int
    rank: int
    num_bytes: int
    checksum: str
    """SHA-256 of the file of arrays."""
    parameters: list[str]
    settings: Settings
    progress: dict[str, Any]

    @property
    def digest(self) -> str:
        """What has to be the same in every part of one checkpoint."""
        shared = [self.iteration, self.num_ranks, self.settings, Progress.from_json(self.progress).shared()]
        return sha256(_canonical(shared).encode()).hexdigest()


def arrays_path(folder: Path, rank: int) -> Path:
    """The arrays of a part."""
    return folder / f"rank{rank}.safetensors"


def manifest_path(folder: Path, rank: int) -> Path:
    """The manifest of a part."""
    return folder / f"rank{rank}.json"


def names_in(directory: Path) -> list[Name]:
    """The checkpoints of which there is a trace in a directory, newest first."""
    folders = directory.iterdir() if directory.is_dir() else ()
    return sorted({name for folder in folders if (name := Name.of(folder))}, reverse=True)


def ranks_in(folder: Path) -> list[int]:
    """The ranks whose manifest is in a folder."""
    found = [re.fullmatch(r"rank(\d+)\.json", path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for match in found if match)


# -- writing -----------------------------------------------------------------------------------------------------------


def write_part(
    directory: Path,
    name: Name,
    rank: int,
    arrays: tuple[Mapping[str, mx.array], Mapping[str, mx.array]],
    settings: Settings,
    progress: Progress,
    at: At = nothing,
) -> None:
    """Write a rank's part: arrays, then the manifest that makes them count.

    Args:
        directory: Of the checkpoints.
        name: Which one.
        rank: Whose part.
        arrays: Parameters, and leaves of the optimizer's state.
        settings: What the run's numbers depend on.
        progress: Where it stands.
        at: Told of each point of writing.

    Raises:
        OSError: If it cannot be written; then there is no part.
    """
    folder, (parameters, state) = directory / str(name), arrays
    # One of the same name would vouch for the new arrays, with the checksum of the old.
    manifest_path(folder, rank).unlink(missing_ok=True)
    named = {PARAMETERS + key: array for key, array in parameters.items()}
    named |= {OPTIMIZER + key: array for key, array in state.items()}
    path = arrays_path(folder, rank)
    checksum = write_whole(path, lambda file: mx.save_safetensors(file, named), lambda point: at(f"arrays {point}"))
    size, where = path.stat().st_size, (name.iteration, name.num_ranks, rank)
    manifest = Manifest(*where, size, checksum, list(parameters), settings, progress.to_json())
    text = _sealed(asdict(manifest)).encode()
    write_whole(manifest_path(folder, rank), lambda file: file.write(text), lambda point: at(f"manifest {point}"))


def remove(folder: Path) -> None:
    """Remove a checkpoint, its manifests first: what a kill leaves of it does not look like a damaged one."""
    with suppress(FileNotFoundError):  # another rank of this machine may be faster
        for rank in ranks_in(folder):
            manifest_path(folder, rank).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


# -- reading -----------------------------------------------------------------------------------------------------------


def read_manifest(folder: Path, rank: int) -> Manifest:
    """A part's manifest, checked.

    Raises:
        CheckpointError: If it is damaged, or is that of another part or of another program.
    """
    path, name = manifest_path(folder, rank), Name.of(folder)
    values = _unsealed(path)
    try:
        manifest = Manifest(**values)
        Progress.from_json(manifest.progress)
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(_refusal(path, f"is no manifest ({type(error).__name__}: {error})")) from error
    if (manifest.iteration, manifest.num_ranks, manifest.rank) != (
        name and name.iteration,
        name and name.num_ranks,
        rank,
    ):
        found = f"rank {manifest.rank} of {manifest.num_ranks} at iteration {manifest.iteration}"
        raise CheckpointError(_refusal(path, f"belongs elsewhere: it is of {found}"))
    return manifest


def check_arrays(folder: Path, manifest: Manifest) -> None:
    """Compare a part's arrays with its manifest.

    Raises:
        CheckpointError: If the file is not there, short, or not what was written.
    """
    path = arrays_path(folder, manifest.rank)
    if not path.is_file():
        raise CheckpointError(_refusal(path, "is not there, although its manifest is"))
    if (size := path.stat().st_size) != manifest.num_bytes:
        raise CheckpointError(_refusal(path, f"has {size} bytes, where {manifest.num_bytes} were written"))
    if (found := digest_of(path)) != manifest.checksum:
        raise CheckpointError(
            _refusal(path, f"is damaged: its checksum is {found[:12]}, not {manifest.checksum[:12]} as it was written")
        )


def read_arrays(folder: Path, rank: int) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """Parameters and optimizer leaves of a part that was checked; lazy, so that only what is used is read."""
    arrays: dict[str, mx.array] = mx.load(str(arrays_path(folder, rank)))  # type: ignore[assignment]
    return _beginning(arrays, PARAMETERS), _beginning(arrays, OPTIMIZER)


def visible_parts(folder: Path) -> list[Manifest]:
    """The manifests that this rank sees; raises as `read_manifest` does."""
    return [read_manifest(folder, rank) for rank in ranks_in(folder)]


def holders(parts: Iterable[Manifest], needed: Iterable[str]) -> tuple[list[Manifest], list[str]]:
    """The parts to read for these parameters, and the parameters that none of them has."""
    left, used = dict.fromkeys(needed), list[Manifest]()
    for part in parts:
        if taken := left.keys() & set(part.parameters):
            used.append(part)
            left = {name: None for name in left if name not in taken}
    return used, list(left)


def _beginning(arrays: Mapping[str, mx.array], start: str) -> dict[str, mx.array]:
    return {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)}


def _canonical(values: Any) -> str:
    return json.dumps(values, sort_keys=True)


def _sealed(values: dict[str, Any]) -> str:
    """A manifest's text, with a checksum of its own."""
    seal = sha256(_canonical(values).encode()).hexdigest()
    return json.dumps({"format": FORMAT, "checksum": seal, "manifest": values}, sort_keys=True, indent=1)


def _unsealed(path: Path) -> dict[str, Any]:
    try:
        whole: Any = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(_refusal(path, f"cannot be read: {error.strerror}")) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(_refusal(path, "is damaged: it is no JSON")) from error
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise CheckpointError(_refusal(path, f"is foreign: expected {FORMAT!r}"))
    values = whole.get("manifest")
    if not isinstance(values, dict) or whole.get("checksum") != sha256(_canonical(values).encode()).hexdigest():
        raise CheckpointError(_refusal(path, "is damaged: its checksum is not its own"))
    return values


def _refusal(path: Path, problem: str) -> str:
    return f"{path} {problem}"
