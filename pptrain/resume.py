"""Which checkpoint a run goes on from: the newest one that every rank can go on from, decided by all of them alike.

Each rank looks for the parts that hold what it needs, whoever wrote them, and tells the others what it found; then all
try the newest checkpoint, and the one before if somebody cannot, and so on.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.optimizers as optim

from pptrain.agreement import Settings, exchange
from pptrain.errors import CheckpointError, ConfigError
from pptrain.executor import materialize
from pptrain.model import Slot
from pptrain.optimizer import restore_state
from pptrain.progress import Progress
from pptrain.store import Name, check_arrays, holders, names_in, read_arrays, visible_parts
from transports import Task, Transport

_log = logging.getLogger(__name__)

_LONGEST = 8000
"""Characters of an answer, so that it can be told to the others."""
_MOST = 500
"""Checkpoints of a directory that are looked at, the newest."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank says of a checkpoint."""

    state: Literal["whole", "lacking", "damaged", "other settings"]
    text: str = ""
    digest: str = ""
    """Of what has to be the same in all parts."""
    seen: tuple[int, ...] = ()
    """The ranks whose parts it sees."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a run wants to go on from.

    Attributes:
        directory: Where this rank looks for checkpoints.
        only: The one that was named.
        may_start_afresh: Whether to begin at the beginning where there is none.
        is_wanted: Whether one is asked for at all; if not, there must be none.
    """

    directory: Path
    only: Name | None
    may_start_afresh: bool
    is_wanted: bool = True

    @staticmethod
    def of(resume: str | None, directory: str | None) -> Asked | None:
        """What `--resume` and `--checkpoint-dir` ask for; None where there can be none to go on from."""
        if resume is None:
            return Asked(Path(directory), None, True, is_wanted=False) if directory else None
        if resume == "auto":
            return Asked(Path(directory or ""), None, True)
        path = Path(resume)
        only = Name.of(path)
        return Asked(path.parent, only, False) if only else Asked(path, None, False)


def choose(transport: Transport, asked: Asked, needed: Collection[str], settings: Settings) -> Task[Name | None]:
    """Agree on a checkpoint with every other rank.

    Args:
        transport: This rank's.
        asked: What for.
        needed: The parameters that this rank has to find.
        settings: What the run's numbers depend on.

    Returns:
        The same on every rank: the newest that is whole for all of them; None to start afresh.

    Raises:
        ConfigError: If it was made with other settings, naming each.
        CheckpointError: If there are some, and none can be used, naming each file and who lacks it.
    """
    everybody = yield from exchange(transport, [(n.iteration, n.num_ranks) for n in names_in(asked.directory)[:_MOST]])
    found = sorted({Name(*pair) for pairs in everybody for pair in pairs}, reverse=True)
    if not asked.is_wanted:
        _refuse_any(asked.directory, found)
        return None
    candidates = [name for name in found if asked.only in (None, name)]
    problems, is_serious = list[str](), len(candidates) > 1
    for name in candidates:
        mine = examine(asked.directory, name, needed, settings)
        answers = [_answer(values) for values in (yield from exchange(transport, asdict(mine)))]
        _refuse_other_settings(name, answers)
        if not (said := _problems(name, answers)):
            _warn(transport.rank, problems, f"Going on from the one before, {name}")
            return name
        problems += said
        is_serious = is_serious or _is_serious(name, answers)
    if asked.may_start_afresh and not is_serious:
        _warn(transport.rank, problems, "There is none before it: starting afresh")
        return None
    raise CheckpointError(_none_to_use(asked, problems, found))


def examine(directory: Path, name: Name, needed: Collection[str], settings: Settings) -> Answer:
    """What this rank finds of a checkpoint: whether it sees, whole, all that it needs."""
    folder = directory / str(name)
    try:
        parts = visible_parts(folder)
        used, missing = holders(parts, needed)
        for part in used or parts[:1]:
            check_arrays(folder, part)
    except CheckpointError as error:
        return Answer("damaged", str(error)[:_LONGEST])
    seen = tuple(part.rank for part in parts)
    if missing or not parts:
        return Answer("lacking", _lacking(folder, sorted({*range(name.num_ranks)} - {*seen}), missing), seen=seen)
    if len({part.digest for part in parts}) > 1:
        return Answer("damaged", f"{folder} has parts of different runs", seen=seen)
    if differing := _differing(parts[0].settings, settings):
        return Answer("other settings", "\n".join(differing)[:_LONGEST], seen=seen)
    return Answer("whole", digest=parts[0].digest, seen=seen)


def put_back(folder: Path, names: Sequence[str], slots: Mapping[str, Slot], optimizer: optim.Optimizer) -> Progress:
    """Give a process the parameters and moments of a checkpoint that was chosen.

    Args:
        folder: The checkpoint.
        names: The parameters that this process updates.
        slots: Where they live.
        optimizer: Of these parameters.

    Returns:
        Where the run stood.

    Raises:
        CheckpointError: If a parameter has another shape or dtype than the model's.
    """
    parts = visible_parts(folder)
    used, _ = holders(parts, names)
    parameters, state, wanted = dict[str, mx.array](), dict[str, mx.array](), {"", *names}
    for part in used or parts[:1]:
        values, leaves = read_arrays(folder, part.rank)
        parameters |= {name: array for name, array in values.items() if name in wanted}
        state |= {leaf: array for leaf, array in leaves.items() if leaf.rpartition(".")[0] in wanted}
    for name, array in parameters.items():
        _check_shape(folder, name, array, slots[name].array)
    materialize(parameters, state)  # the files may be removed later
    for name, array in parameters.items():
        slots[name].put(array)
    restore_state(optimizer, state)
    return Progress.from_json(parts[0].progress)


def _check_shape(folder: Path, name: str, found: mx.array, expected: mx.array) -> None:
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        raise CheckpointError(
            f"[resume] {folder} has {name} as {found.dtype} {tuple(found.shape)}. Expected {expected.dtype} "
            f"{tuple(expected.shape)}, as in this model. Is it another model's checkpoint?"
        )


def _refuse_any(directory: Path, found: Sequence[Name]) -> None:
    if found:
        raise ConfigError(
            f"[checkpoint-dir] {directory} has checkpoints already, the newest is {found[0]}. Expected none, since "
            "--resume is not given. Give --resume to go on from it, or another --checkpoint-dir."
        )


def _answer(values: Mapping[str, Any]) -> Answer:
    seen: Any = tuple(values["seen"])
    return Answer(**{**values, "seen": seen})


def _problems(name: Name, answers: Sequence[Answer]) -> list[str]:
    """What keeps the ranks from going on from a checkpoint."""
    said = [f"{name}, rank {rank}: {a.text}" for rank, a in enumerate(answers) if a.state != "whole"]
    if not said and len({answer.digest for answer in answers}) > 1:
        return [f"{name}: ranks have parts of different runs"]
    return said


def _is_serious(name: Name, answers: Sequence[Answer]) -> bool:
    """Whether this is more than a save that a kill cut short: that one was never whole anywhere."""
    seen = {rank for answer in answers for rank in answer.seen}
    is_damaged = any(answer.state == "damaged" for answer in answers)
    return is_damaged or seen == {*range(name.num_ranks)}


def _lacking(folder: Path, ranks: Sequence[int], missing: Sequence[str]) -> str:
    files = ", ".join(f"rank{rank}.json" for rank in ranks) or "every part that was written"
    needs = f", so that {len(missing)} parameters are missing, first {missing[0]}" if missing else ""
    return f"{folder} lacks {files} here{needs}"


def _differing(theirs: Settings, ours: Settings) -> list[str]:
    names = sorted(theirs.keys() | ours.keys())
    pairs = [(name, theirs.get(name, "none"), ours.get(name, "none")) for name in names]
    return [f"{name}: it has {old}, this run has {new}" for name, old, new in pairs if old != new]


def _refuse_other_settings(name: Name, answers: Sequence[Answer]) -> None:
    lines = {line for a in answers if a.state == "other settings" for line in a.text.splitlines()}
    if lines:
        raise ConfigError(
            f"[resume] Checkpoint {name} was made with other settings:\n  " + "\n  ".join(sorted(lines)) + "\nExpected "
            "the same, or the continued run would be another one; only the cut, schedule, stages, transport and iters "
            "may differ. Start with the checkpoint's settings, or give another --checkpoint-dir."
        )


def _warn(rank: int, problems: Sequence[str], what_now: str) -> None:
    if problems and rank == 0:
        _log.warning("[resume] Cannot go on from\n  %s\n%s.", "\n  ".join(problems), what_now)


def _none_to_use(asked: Asked, problems: Sequence[str], found: Sequence[Name]) -> str:
    before = [name for name in found if asked.only and name < asked.only]
    if not problems:
        which = f"checkpoint {asked.only}" if asked.only else "checkpoint"
        there = f" There are: {', '.join(map(str, found))}." if found else ""
        return f"[resume] There is no {which} in {asked.directory}. Expected one on every rank.{there} Check --resume."
    offer = (
        "Bring the files back, copy those that a rank lacks to it, or give another --checkpoint-dir to start afresh."
    )
    if before:
        offer = f"Go on from the one before: --resume {asked.directory / str(before[0])}."
    return "\n  ".join(["[resume] No checkpoint can be used:", *problems]) + f"\nExpected one that is whole. {offer}"
