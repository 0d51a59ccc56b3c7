"""Weight files from the hub: each rank fetches those that hold its own stages' tensors, and no other.

What a file holds is known from its header, which comes first. For a file that is not fetched a hollow one stands in,
its header and a hole where its data would be, so that the model can be built and cut before anything large is here;
nothing that a rank evaluates is computed from a hole.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from threading import Thread
from typing import Any

import mlx.core as mx
from huggingface_hub import DryRunFileInfo, parse_safetensors_file_metadata, snapshot_download
from huggingface_hub.constants import HF_HOME
from huggingface_hub.errors import DryRunError, LocalEntryNotFoundError
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from pptrain.agreement import exchange
from pptrain.config import TrainConfig
from pptrain.errors import ModelError
from pptrain.lazy import origins
from pptrain.microbatch import kept_random_state
from pptrain.recipe import Loaded, cannot_load, load_base
from transports import Task, Transport, World

WEIGHTS = "model*.safetensors"
"""The files that mlx-lm reads a model's tensors from."""
_ROUND_SECONDS = 1.0

OwnNames = Callable[[Loaded], Collection[str]]
"""The parameters that this process reads of a model."""


@contextmanager
def fetched(config: TrainConfig, world: World, own_names: OwnNames) -> Generator[Path]:
    """A directory to load the model from; a local one as it is.

    All ranks call this alike, and go on when every one of them has its files, however long that takes.

    Args:
        config: Names the model.
        world: Whose ranks fetch, each for itself.
        own_names: Of the model as it is loaded, without adapters.

    Raises:
        ModelError: If there is no such model, or a file of it cannot be fetched.
    """
    with tempfile.TemporaryDirectory(prefix="pptrain-") as folder:
        fetch = _Fetch(config, world, Path(folder))
        together(world, fetch.outline)
        fetch.choose(own_names)
        together(world, fetch.weights)
        yield fetch.directory


def together(world: World, work: Callable[[], None]) -> None:
    """Do something that may take long, while the ranks tell each other that they are still at it.

    A wait for another rank is limited, and a failure of one is to be known by all at once.
    """
    ranks = world.local_ranks
    if world.world_size == len(ranks):
        work()
        return
    failures = list[Exception]()
    thread = Thread(target=lambda: _caught(work, failures), daemon=True)
    thread.start()
    are_all_done = False
    while not are_all_done:
        thread.join(_ROUND_SECONDS)
        if failures:
            raise failures[0]
        tasks = {rank: _all_of(world.transport(rank), not thread.is_alive()) for rank in ranks}
        are_all_done = world.run(tasks)[ranks[0]]
    if failures:
        raise failures[0]


def _caught(work: Callable[[], None], failures: list[Exception]) -> None:
    try:
        work()
    except Exception as error:  # raised again by the thread that waits
        failures.append(error)


def _all_of(transport: Transport, is_done: bool) -> Task[bool]:
    everybody = yield from exchange(transport, is_done)
    return all(everybody)


# -- from the hub ------------------------------------------------------------------------------------------------------


class _Fetch:
    """What one process fetches: first what the model looks like, then the weights that it reads.

    Args:
        config: Names the model.
        world: Whose ranks this process has.
        folder: An empty one.
    """

    def __init__(self, config: TrainConfig, world: World, folder: Path) -> None:
        self._config, self._folder, self._is_whole = config, folder, _needs_all(config, world)
        self._here, self._absent, self._wanted = list[str](), set[str](), list[str]()
        self._snapshot, self._hollow = Path(), Path()
        self.directory = Path(config.model)
        """Where the model is, once it is."""

    def outline(self) -> None:
        """Fetch all but the weights, or where this process reads everything, all."""
        if self.directory.exists():
            return
        with _told(self._config.model):
            if not self._is_whole:
                files = _files(self._config.model)
                self._look(files) if files else self._look_offline()
            if self._absent:
                self.directory = self._stand_in("outline")
            else:
                self.directory = Path(snapshot_download(self._config.model, allow_patterns=DEFAULT_ALLOW_PATTERNS))

    def _look(self, files: Sequence[DryRunFileInfo]) -> None:
        absent = {f.filename: f for f in files if fnmatch(f.filename, WEIGHTS) and not f.is_cached}
        if not absent:
            return
        commit = files[0].commit_hash
        self._here = [file.filename for file in files if file.filename not in absent]
        self._snapshot, self._hollow = self._download(commit, self._here), _hollow_files(self._config.model, commit)
        for name, file in absent.items():
            if not (self._hollow / name).exists():
                header = parse_safetensors_file_metadata(self._config.model, name, revision=commit)
                write_hollow(self._hollow / name, header, file.file_size or 0)
        self._absent = {*absent}

    def _look_offline(self) -> None:
        """What was found at an earlier start, where the hub is out of reach now."""
        patterns = [pattern for pattern in DEFAULT_ALLOW_PATTERNS if pattern != WEIGHTS]
        try:
            self._snapshot = Path(snapshot_download(self._config.model, allow_patterns=patterns))
        except LocalEntryNotFoundError:
            return
        self._hollow = _hollow_files(self._config.model, self._snapshot.name)
        hollow = {path.name for path in self._hollow.glob(WEIGHTS)}
        self._absent = {name for name in hollow if not (self._snapshot / name).exists()}

    def choose(self, own_names: OwnNames) -> None:
        """Find the files that this process reads."""
        if self._absent:
            needed = needed_files(self.directory, self._config, own_names)
            self._wanted = sorted(needed & self._absent)

    def weights(self) -> None:
        """Fetch those; hollow ones stand in for the others."""
        if not self._absent:
            return
        with _told(self._config.model):
            if self._wanted:
                self._snapshot = self._download(self._snapshot.name, [*self._here, *self._wanted])
            self._absent -= {*self._wanted}
            self.directory = self._stand_in("model")

    def _download(self, commit: str, names: list[str]) -> Path:
        """Files of the commit that was looked at, shown as they come."""
        return Path(snapshot_download(self._config.model, revision=commit, allow_patterns=names))

    def _stand_in(self, name: str) -> Path:
        """A directory of links to what is here, and to hollow files for what is not."""
        directory = self._folder / name
        directory.mkdir()
        for path in [*self._snapshot.iterdir(), *(self._hollow / absent for absent in self._absent)]:
            (directory / path.name).symlink_to(path.resolve())
        return directory


def _hollow_files(repo: str, commit: str) -> Path:
    """Where the hollow files of a commit are kept: with them a run can start again without the hub."""
    return Path(HF_HOME) / "pptrain" / repo.replace("/", "--") / commit


@contextmanager
def _told(model: str) -> Generator[None]:
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # whatever the hub raises: the cause is in the message
        raise cannot_load(model, error) from error


def _files(repo: str) -> Sequence[DryRunFileInfo]:
    """What mlx-lm would fetch; nothing where the hub cannot be reached, and all has to be here already."""
    try:
        return snapshot_download(repo, allow_patterns=DEFAULT_ALLOW_PATTERNS, dry_run=True)
    except DryRunError:
        return []


def _needs_all(config: TrainConfig, world: World) -> bool:
    """Whether this process reads the whole model: all ranks are here, it writes it, or its cut is yet to be found."""
    writes = config.train and config.fine_tune_type == "full" and 0 in world.local_ranks
    return world.world_size == len(world.local_ranks) or writes or config.layers == "auto"


def write_hollow(path: Path, header: Any, num_bytes: int) -> None:
    """Write a safetensors file with a hole for its data, as long as the real one.

    Args:
        path: The file.
        header: huggingface_hub's `SafetensorsFileMetadata` of the real one.
        num_bytes: Of the real one.

    Raises:
        ModelError: If it has no room for what its header says.
    """
    entries: dict[str, Any] = {
        name: {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": tensor.data_offsets}
        for name, tensor in header.tensors.items()
    }
    end = max((tensor.data_offsets[1] for tensor in header.tensors.values()), default=0)
    if header.metadata:
        entries["__metadata__"] = header.metadata
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    room = num_bytes - end - 8
    if len(text) > room:
        raise ModelError(
            f"[model] {path.name} has {num_bytes} bytes on the hub, fewer than its header says. Expected a whole "
            "safetensors file. Ask its author, or choose another model."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{os.getpid()}-{path.name}")
    with beside.open("wb") as file:
        file.write(struct.pack("<Q", room) + text.ljust(room))
        file.truncate(num_bytes)
    beside.replace(path)


# -- which files -------------------------------------------------------------------------------------------------------


def needed_files(directory: Path, config: TrainConfig, own_names: OwnNames) -> set[str]:
    """The weight files of a directory, hollow or not, from which this process's own parameters are computed."""
    with kept_random_state():
        loaded = load_base(config, directory)
        own = _modules(own_names(loaded))
    arrays, file_of = dict[str, mx.array](), dict[str, str]()
    for path in sorted(directory.glob(WEIGHTS)):
        tensors: dict[str, mx.array] = mx.load(str(path))  # type: ignore[assignment]
        arrays |= tensors
        file_of |= dict.fromkeys(tensors, path.name)
    sanitize: Any = getattr(loaded.model, "sanitize", None)
    weights: dict[str, mx.array] = sanitize(dict(arrays)) if sanitize else arrays
    tensors_of = origins(weights, arrays)
    if not own <= _modules(weights):  # renamed after `sanitize`: who can say where from
        return {*file_of.values()}
    return {file_of[tensor] for name in weights if _modules([name]) <= own for tensor in tensors_of[name]}


def _modules(names: Iterable[str]) -> set[str]:
    """The modules that parameters belong to: how one is packed into several arrays is its module's own affair."""
    return {name.rpartition(".")[0] for name in names}
