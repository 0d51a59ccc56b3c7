"""Programs as text: a CSV with one row a rank and one instruction a cell.

`0F1` is an action: stage 0, forward, microbatch 1. `0SEND_F1` hands that activation on, `1RECV_F1` takes it; `1SEND_B0`
and `0RECV_B0` are the two ends of a cotangent's way down. The stage in front is always the one that acts. Empty cells
mean nothing, a row without any is a rank without work::

    0F0,0SEND_F0,0RECV_B0,0B0
    1RECV_F0,1F0,1B0,1SEND_B0

PyTorch writes the actions of its pipeline schedules in the same way: rows of actions alone are a schedule.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from pptrain.errors import NotationError
from pptrain.program import Carried, Instruction, Message, Program, Receive, Send
from pptrain.schedule import Action, Kind, Placement, Schedule

_WORD = re.compile(
    r"(?P<stage>[0-9]{1,5})(?:(?P<verb>SEND|RECV)_(?P<carried>[FB])|(?P<kind>[FBIW]))(?P<microbatch>[0-9]{1,6})"
)
_EXPECTED = "Expected an action such as 2F0, 2B0, 2I0 or 2W0, or a message's end such as 0SEND_F1 or 1RECV_F1."


@dataclass(frozen=True, slots=True)
class _Cell:
    place: str
    word: str
    stage: int
    """The stage that acts."""
    event: Action | Message
    is_send: bool


def parse_program(text: str, placement: Placement | None = None) -> tuple[Program, ...]:
    """Read a program, with its sends and receives.

    Args:
        text: A CSV; see the module's docstring.
        placement: The rank of each stage; as `placement_of` reads it from the text if it is not given.

    Raises:
        NotationError: If a cell is no instruction, or speaks of a stage that has no rank.
    """
    rows = [list(_cells(rank, line)) for rank, line in enumerate(text.splitlines())]
    if not rows:
        raise NotationError("The text has no row. Expected one row for each rank.")
    if placement is None:
        placement = _ranks(
            [(rank, cell.stage, isinstance(cell.event, Action)) for rank, row in enumerate(rows) for cell in row]
        )
    return tuple([_instruction(cell, placement) for cell in row] for row in rows)


def read_schedule(text: str, name: str = "custom") -> Schedule:
    """Read a schedule, without sends and receives; which rank has which stages is seen from its actions.

    Whether it can be run is for `simulate` to find.

    Raises:
        NotationError: If a cell is no action, or a stage stands nowhere or in two rows.
    """
    programs = parse_program(text)
    placement = placement_of(programs)
    rows = tuple(tuple(_alone(i, rank, placement) for i in program) for rank, program in enumerate(programs))
    return Schedule(name, len({action.microbatch for row in rows for action in row}), placement, rows)


def _alone(instruction: Instruction, rank: int, placement: Placement) -> Action:
    if not isinstance(instruction, Action):
        raise NotationError(f"[row {rank + 1} (rank {rank})] {instruction} is a message. Expected actions alone.")
    home = placement[instruction.stage]
    if home != rank:
        raise NotationError(
            f"[row {rank + 1} (rank {rank})] {instruction} stands here, but stage {instruction.stage} is rank {home}'s "
            f"(row {home + 1}). Expected each stage in one row."
        )
    return instruction


def placement_of(programs: Sequence[Program]) -> tuple[int, ...]:
    """The rank of each stage: where its actions stand; where its messages do, if it has no action.

    A stage that stands on two ranks is taken to belong to the first, so that the verifier can name what is astray.

    Raises:
        NotationError: If a stage below the last one stands nowhere.
    """
    return _ranks(
        [(rank, stage_of(i), isinstance(i, Action)) for rank, program in enumerate(programs) for i in program]
    )


def stage_of(instruction: Instruction) -> int:
    """The stage that acts: the one in front of the printed instruction."""
    match instruction:
        case Action():
            return instruction.stage
        case Send():
            return instruction.message.stage
        case Receive():
            return instruction.message.to_stage


def program_to_csv(programs: Sequence[Sequence[Instruction]]) -> str:
    """The text that `parse_program` reads, and of a schedule's actions `read_schedule`: one row a rank."""
    return "".join(",".join(map(str, program)) + "\n" for program in programs)


def _cells(rank: int, line: str) -> Iterator[_Cell]:
    for column, cell in enumerate(line.split(",")):
        if word := cell.strip():
            yield _cell(f"row {rank + 1} (rank {rank}), column {column + 1}", word)


def _cell(place: str, word: str) -> _Cell:
    found = _WORD.fullmatch(word)
    if not found:
        raise NotationError(f"[{place}] {word!r} is no instruction. {_EXPECTED}")
    stage, microbatch = int(found["stage"]), int(found["microbatch"])
    if found["kind"]:
        return _Cell(place, word, stage, Action(stage, cast(Kind, found["kind"]), microbatch), False)
    carried, is_send = cast(Carried, found["carried"]), found["verb"] == "SEND"
    source = stage if is_send else stage - 1 if carried == "F" else stage + 1
    message = Message(source, carried, microbatch)
    if min(message.stage, message.to_stage) < 0:
        other = "to" if is_send else "from"
        raise NotationError(f"[{place}] {word} is a message {other} stage -1. Expected stages from 0 on.")
    return _Cell(place, word, stage, message, is_send)


def _ranks(stands: Sequence[tuple[int, int, bool]]) -> tuple[int, ...]:
    """The rank of each stage, from (rank, stage, is it an action) of every instruction."""
    ranks = dict[int, int]()
    for rank, stage, _ in sorted(stands, key=lambda stand: not stand[2]):
        ranks.setdefault(stage, rank)
    for stage in range(max(ranks, default=-1)):
        if stage not in ranks:
            raise NotationError(
                f"Stage {stage} has no instruction in any row, though stage {max(ranks)} has. "
                "Expected stages from 0 on without a gap. Add its row, or give the placement."
            )
    return tuple(ranks[stage] for stage in sorted(ranks))


def _instruction(cell: _Cell, placement: Placement) -> Instruction:
    event = cell.event
    for stage in (event.stage,) if isinstance(event, Action) else (event.stage, event.to_stage):
        if stage >= len(placement):
            raise NotationError(
                f"[{cell.place}] {cell.word} speaks of stage {stage}, which has no rank. "
                f"Expected stages from 0 to {len(placement) - 1}."
            )
    if isinstance(event, Action):
        return event
    return Send(event, placement[event.to_stage]) if cell.is_send else Receive(event, placement[event.stage])
