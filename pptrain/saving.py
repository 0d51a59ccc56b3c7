"""A run's checkpoints: each rank writes its part, all hear whether every part was written, and old ones are removed.

A checkpoint that one rank could not write, its disk being full, counts for none: the run goes on, and the one before
stays. So what was removed was never the last that all ranks hold whole.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np

from pptrain.agreement import Settings, exchange
from pptrain.durable import At, nothing, write_whole
from pptrain.optimizer import state_leaves
from pptrain.pipeline import Pipeline
from pptrain.progress import Progress
from pptrain.store import Name, arrays_path, manifest_path, names_in, remove, write_part
from transports import Task, Transport

_log = logging.getLogger(__name__)


class Checkpoints:
    """Writes the checkpoints of one process's ranks.

    Args:
        directory: Where they are.
        keep: How many, at least.
        settings: What the run's numbers depend on.
        is_gathered: Whether the first rank gets every part.
        at: Told of each point of writing.
    """

    def __init__(
        self, directory: Path, keep: int, settings: Settings, is_gathered: bool = False, at: At = nothing
    ) -> None:
        self._directory, self._keep, self._settings, self._is_gathered = directory, keep, settings, is_gathered
        self._at = at
        self._refused = list[Name]()
        self._newest: Name | None = None

    def begin(self, name: Name | None, refused: Sequence[Name]) -> None:
        """The run goes on from this checkpoint; those that it could not go on from are removed by the next save."""
        self._newest, self._refused = name, list(refused)

    def save(self, pipeline: Pipeline, optimizer: optim.Optimizer, progress: Progress) -> Path | None:
        """Write a checkpoint on every rank, which all call alike.

        Returns:
            Its folder, or None if a rank could not write its part; this rank's own reason is logged.
        """
        name = Name(progress.iteration, pipeline.num_ranks)
        folder = self._directory / str(name)
        if name == self._newest:
            return folder
        failures = [not self._write(pipeline, optimizer, progress, name, r) for r in pipeline.world.local_ranks]
        failed = [rank for rank, has in enumerate(pipeline.everybody(float(any(failures)))) if has]
        if failed:
            remove(folder)
            if 0 in pipeline.world.local_ranks:
                _log.warning("[checkpoint] %s counts for none: rank %s could not write it. Going on.", name, failed[0])
            return None
        self._newest = name
        self._at("committed")
        if self._is_gathered:
            pipeline.run(lambda transport: gather_parts(transport, folder))
        self._prune(name)
        return folder

    def _write(self, pipeline: Pipeline, optimizer: optim.Optimizer, progress: Progress, name: Name, rank: int) -> bool:
        names = pipeline.updated_by(rank)
        arrays = {key: pipeline.slots[key].array for key in names}, state_leaves(optimizer, names)
        try:
            write_part(self._directory, name, rank, arrays, self._settings, progress, self._at)
        except OSError as error:
            _log.warning(
                "[checkpoint] Rank %d cannot write to %s: %s. Make room; the checkpoint before stays.",
                rank,
                self._directory / str(name),
                error.strerror,
            )
            return False
        return True

    def _prune(self, newest: Name) -> None:
        older = [name for name in names_in(self._directory) if name.iteration < newest.iteration]
        good = [name for name in older if name not in self._refused]
        for name in [*good[self._keep - 1 :], *self._refused]:
            if name != newest:
                remove(self._directory / str(name))
        self._refused = []


def gather_parts(transport: Transport, folder: Path) -> Task[None]:
    """Hand every rank's part down to the first, neighbour by neighbour; it writes what it does not have yet.

    Parts go one after the other, so that no rank holds more than one besides its own.
    """
    rank, world_size = transport.rank, transport.world_size
    files = [_bytes_of(path) for path in _paths(folder, rank)] if rank else []
    sizes: list[list[int]] = yield from exchange(transport, [data.size for data in files])
    if rank:
        yield from _send_down(transport, files, rank)
    for source in range(rank + 1, world_size):
        files = list[mx.array]()
        for size in sizes[source]:
            incoming = transport.receive((size,), mx.uint8, rank + 1, f"checkpoint of rank {source}")
            yield transport.arrive(incoming)
            files.append(incoming.array)
        if rank:
            yield from _send_down(transport, files, source)
        else:
            _keep_copy(folder, source, files)
    yield transport.flush()


def _send_down(transport: Transport, files: Sequence[mx.array], source: int) -> Task[None]:
    for data in files:
        yield transport.send(data, transport.rank - 1, f"checkpoint of rank {source}")


def _paths(folder: Path, rank: int) -> list[Path]:
    return [arrays_path(folder, rank), manifest_path(folder, rank)]


def _bytes_of(path: Path) -> mx.array:
    return mx.array(np.frombuffer(path.read_bytes(), np.uint8))


def _keep_copy(folder: Path, rank: int, files: Sequence[mx.array]) -> None:
    if manifest_path(folder, rank).exists():  # all ranks write to one place
        return
    try:
        for path, data in zip(_paths(folder, rank), files, strict=True):
            write_whole(path, lambda file, data=data: file.write(np.asarray(data).tobytes()))
    except OSError as error:
        _log.warning("[gather] Rank 0 cannot keep the part of rank %d: %s. Make room.", rank, error.strerror)
