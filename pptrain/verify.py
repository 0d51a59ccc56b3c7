"""Decides whether a program is right, before anything runs, and answers each no with a counter-example in words.

The claims, for a program of any origin and stages placed anywhere:

- **complete**: every stage has, for every microbatch, one F, and one B or else one I and one W; each on the stage's
  rank and exactly once. In an evaluation, one F and nothing else.
- **ordered**: on its rank, every action stands after all that it needs. F needs the F of the stage below, a backward (B
  or I) its own F and the cotangent of the stage above: the action itself if that stage is on the same rank, the receive
  of its message if it is not. W needs its own I. A send needs the action that makes its message.
- **matched**: each message is sent once and received once, by the ranks of the two stages of its edge, which are not
  the same one, and somebody needs it.
- **order-consistent**: links have no tags, so on each directed link the k-th message received has to be the k-th sent.
- **deadlock-free**: every rank comes to its end, and all that it sent has left it.
- **within its limit**: no rank keeps the residuals of more microbatches than allowed, all its stages counted together.
  An F keeps one; a B, or the W after an I, frees it.
- **filled once**: no message is received again while the first is still waiting for the action that needs it. (There is
  one buffer for each message, as in the executor.)

How a program runs, over links of any capacity and over both kinds of lanes, and why one run decides for all: see
`pptrain.deadlock`.

Why capacity 0 on a single lane is the strictest
------------------------------------------------
Let one run of a program, with capacity 0 on a single lane, come to its end.

1. *Any capacity, also a different one for each link.* Write each rendezvous as a send and the receive at once after it.
   That is a run over links with room for one message or more, and it comes to the end; by the diamond all do.
2. *Directional lanes.* Let each queued message leave before its rank goes on. That is a run over directional lanes of
   the same capacity, and it comes to the end; by the diamond all do.

So a yes there is a yes for every capacity, lane and interleaving, and also where a message is carried in several parts.
The converse is false: `rank 0: send, receive; rank 1: send, receive` needs room for one message.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from pptrain.deadlock import find_deadlock
from pptrain.notation import stage_of
from pptrain.program import Carried, Instruction, Message, Program, Receive, Send
from pptrain.schedule import Action, Kind, Placement
from transports import Lanes


@dataclass(frozen=True, slots=True)
class Verdict:
    """True, or false with a counter-example."""

    counterexample: str | None = None

    def __bool__(self) -> bool:
        return self.counterexample is None

    def __str__(self) -> str:
        return "yes" if self.counterexample is None else f"no: {self.counterexample}"


YES = Verdict()

_MADE_BY: Mapping[Carried, Sequence[Kind]] = {"F": ("F",), "B": ("B", "I")}
"""The actions that make a message; one of them is enough."""


@dataclass(frozen=True, slots=True)
class Verdicts:
    """One verdict for each claim of the module's docstring; true if all of them are."""

    complete: Verdict
    ordered: Verdict
    matched: Verdict
    order_consistent: Verdict
    deadlock_free: Verdict
    within_limit: Verdict
    filled_once: Verdict

    def __bool__(self) -> bool:
        return not self.broken

    @property
    def broken(self) -> dict[str, str]:
        """The counter-example of each claim that does not hold."""
        verdicts: dict[str, Verdict] = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: v.counterexample for name, v in verdicts.items() if v.counterexample is not None}

    def __str__(self) -> str:
        return "\n".join(f"{f.name.replace('_', ' ')}: {getattr(self, f.name)}" for f in fields(self))


def verify(
    programs: Sequence[Program],
    placement: Placement,
    num_microbatches: int | None = None,
    *,
    capacity: int | None = 0,
    lanes: Lanes = "single",
    cotangents: Collection[int] | None = None,
    is_training: bool = True,
    residual_limit: int | Sequence[int] | None = None,
) -> Verdicts:
    """Decide every claim.

    Args:
        programs: The program of each rank.
        placement: The rank of each stage.
        num_microbatches: How many a step has; as many as the program speaks of if it is not given.
        capacity: How many messages a link holds; None for any number. With 0 on a single lane, a yes holds for all.
        lanes: How a rank communicates.
        cotangents: Stages whose cotangent somebody below needs, as `lower` takes them; all but the first if not given.
        is_training: Whether there are backwards at all.
        residual_limit: The microbatches whose residuals a rank may keep, for all ranks or one each; None for no limit.
    """
    if num_microbatches is None:
        num_microbatches = microbatches_of(programs)
    if cotangents is None:
        cotangents = range(1, len(placement))
    return Verdicts(
        complete=is_complete(programs, placement, num_microbatches, is_training),
        ordered=is_ordered(programs, placement, cotangents),
        matched=is_matched(programs, placement, cotangents),
        order_consistent=is_order_consistent(programs),
        deadlock_free=Verdict(find_deadlock(programs, capacity, lanes)),
        within_limit=YES if residual_limit is None else is_within_limit(programs, residual_limit),
        filled_once=is_filled_once(programs),
    )


def microbatches_of(programs: Sequence[Program]) -> int:
    """One more than the highest microbatch that a program speaks of."""
    events = (i if isinstance(i, Action) else i.message for program in programs for i in program)
    return max((event.microbatch + 1 for event in events), default=0)


# -- complete ----------------------------------------------------------------------------------------------------------


def is_complete(
    programs: Sequence[Program], placement: Placement, num_microbatches: int, is_training: bool = True
) -> Verdict:
    """Whether every stage does everything that it has to do for each microbatch, and does it once."""
    stands = dict[Action, str]()
    for action, rank, at in _actions(programs):
        if reason := _misplaced(action, rank, placement, num_microbatches, is_training):
            return Verdict(f"{action} at {at} {reason}.")
        if action in stands:
            return Verdict(f"{action} stands twice: at {stands[action]} and at {at}.")
        stands[action] = at
    for stage in range(len(placement)):
        for j in range(num_microbatches):
            if reason := _missing(stage, j, stands, is_training):
                return Verdict(reason)
    return YES


def _misplaced(action: Action, rank: int, placement: Placement, num_microbatches: int, is_training: bool) -> str | None:
    if not 0 <= action.stage < len(placement):
        return f"is of a stage that there is not: stages are 0 to {len(placement) - 1}"
    if not 0 <= action.microbatch < num_microbatches:
        return f"is of a microbatch that there is not: they are 0 to {num_microbatches - 1}"
    if placement[action.stage] != rank:
        return f"stands on the wrong rank: stage {action.stage} is on rank {placement[action.stage]}"
    if action.kind != "F" and not is_training:
        return "is a backward, and an evaluation has none"
    return None


def _missing(stage: int, j: int, stands: Collection[Action], is_training: bool) -> str | None:
    whole, parts = Action(stage, "B", j), [Action(stage, "I", j), Action(stage, "W", j)]
    there = [part for part in parts if part in stands]
    if Action(stage, "F", j) not in stands:
        return f"{Action(stage, 'F', j)} is missing: stage {stage} never runs microbatch {j} forward."
    if not is_training:
        return None
    if whole in stands and there:
        return f"{whole} and {there[0]} both stand: the backward of microbatch {j} is done twice by stage {stage}."
    if whole in stands or len(there) == 2:
        return None
    if there:
        [absent] = [part for part in parts if part not in stands]
        return f"{absent} is missing, though {there[0]} stands: a backward in parts has both."
    return f"Stage {stage} has no backward for microbatch {j}: neither {whole} nor {parts[0]} and {parts[1]}."


# -- ordered -----------------------------------------------------------------------------------------------------------


def is_ordered(programs: Sequence[Program], placement: Placement, cotangents: Collection[int]) -> Verdict:
    """Whether every action and every send stands after what it needs on its rank."""
    for rank, program in enumerate(programs):
        done = set[Instruction]()
        for place, instruction in enumerate(program):
            for alternatives in _needs(instruction, rank, placement, cotangents):
                if done.isdisjoint(alternatives):
                    return Verdict(_too_early(rank, place, program, alternatives))
            done.add(instruction)
    return YES


def _needs(
    instruction: Instruction, rank: int, placement: Placement, cotangents: Collection[int]
) -> Iterator[list[Instruction]]:
    """What has to stand before an instruction; of each list one is enough."""
    match instruction:
        case Receive():
            pass
        case Send(message):
            yield _makers(message)
        case Action():
            yield from _needs_of_action(instruction, rank, placement, cotangents)


def _needs_of_action(
    action: Action, rank: int, placement: Placement, cotangents: Collection[int]
) -> Iterator[list[Instruction]]:
    stage, j = action.stage, action.microbatch
    match action.kind:
        case "F":
            if stage > 0:
                yield _arrivals(Message(stage - 1, "F", j), rank, placement)
        case "B" | "I":
            yield [Action(stage, "F", j)]
            if stage < len(placement) - 1 and stage + 1 in cotangents:
                yield _arrivals(Message(stage + 1, "B", j), rank, placement)
        case "W":
            yield [Action(stage, "I", j)]


def _makers(message: Message) -> list[Instruction]:
    return [Action(message.stage, kind, message.microbatch) for kind in _MADE_BY[message.carried]]


def _arrivals(message: Message, rank: int, placement: Placement) -> list[Instruction]:
    """How the data of a message come to a rank: by actions of its own, or by a receive."""
    source = _rank_of(message.stage, placement)
    if source == rank:
        return _makers(message)
    return [Receive(message, -1 if source is None else source)]


def _too_early(rank: int, place: int, program: Program, alternatives: Sequence[Instruction]) -> str:
    needed = " or ".join(map(str, alternatives))
    later = [i for i in range(place, len(program)) if program[i] in alternatives]
    if later:
        behind = f"{program[later[0]]}, which stands after it, at {_at(rank, later[0])}"
        return f"{program[place]} at {_at(rank, place)} needs {behind}."
    return f"{program[place]} at {_at(rank, place)} needs {needed}, which rank {rank} never has."


# -- matched -----------------------------------------------------------------------------------------------------------


def is_matched(programs: Sequence[Program], placement: Placement, cotangents: Collection[int]) -> Verdict:
    """Whether each message leaves and arrives once, where its two stages are."""
    sends, receives = dict[Message, str](), dict[Message, str]()
    for rank, program in enumerate(programs):
        for place, instruction in enumerate(program):
            if isinstance(instruction, Action):
                continue
            at, ends = _at(rank, place), sends if isinstance(instruction, Send) else receives
            if reason := _astray(instruction, rank, placement, cotangents):
                return Verdict(f"{instruction} at {at} {reason}.")
            if instruction.message in ends:
                return Verdict(f"{instruction} stands twice: at {ends[instruction.message]} and at {at}.")
            ends[instruction.message] = at
    for message, at in sends.items():
        if message not in receives:
            return Verdict(f"{message} is sent at {at} and never received by stage {message.to_stage}.")
    for message, at in receives.items():
        if message not in sends:
            return Verdict(f"{message} is received at {at} and never sent by stage {message.stage}.")
    return YES


def _astray(instruction: Send | Receive, rank: int, placement: Placement, cotangents: Collection[int]) -> str | None:
    message, own = instruction.message, stage_of(instruction)
    source, to = _rank_of(message.stage, placement), _rank_of(message.to_stage, placement)
    if source is None or to is None:
        return f"is of an edge that there is not: stages are 0 to {len(placement) - 1}"
    if source == to:
        return f"is a message between stages {message.stage} and {message.to_stage}, which are both on rank {to}"
    if message.carried == "B" and message.stage not in cotangents:
        return f"is a cotangent that nobody below stage {message.stage} needs"
    if placement[own] != rank:
        return f"stands on the wrong rank: stage {own} is on rank {placement[own]}"
    if isinstance(instruction, Send) and instruction.to != to:
        return f"goes to rank {instruction.to}, but stage {message.to_stage} is on rank {to}"
    if isinstance(instruction, Receive) and instruction.source != source:
        return f"waits for rank {instruction.source}, but stage {message.stage} is on rank {source}"
    return None


# -- order-consistent --------------------------------------------------------------------------------------------------


def is_order_consistent(programs: Sequence[Program]) -> Verdict:
    """Whether both ends of every directed link name its messages in one order, as far as both go."""
    sent, received = dict[tuple[int, int], list[tuple[Send, str]]](), dict[tuple[int, int], list[tuple[Receive, str]]]()
    for rank, program in enumerate(programs):
        for place, instruction in enumerate(program):
            match instruction:
                case Send():
                    sent.setdefault((rank, instruction.to), []).append((instruction, _at(rank, place)))
                case Receive():
                    received.setdefault((instruction.source, rank), []).append((instruction, _at(rank, place)))
                case Action():
                    pass
    for (source, to), sends in sent.items():
        pairs = zip(sends, received.get((source, to), []), strict=False)
        for k, ((send, sent_at), (receive, received_at)) in enumerate(pairs):
            if send.message != receive.message:
                return Verdict(
                    f"Message {k} on the link from rank {source} to rank {to} is sent as {send.message} ({send} at "
                    f"{sent_at}) and received as {receive.message} ({receive} at {received_at}): links have no tags, "
                    f"so one would be taken for the other."
                )
    return YES


# -- memory ------------------------------------------------------------------------------------------------------------


def is_within_limit(programs: Sequence[Program], limit: int | Sequence[int]) -> Verdict:
    """Whether no rank keeps the residuals of more microbatches than its limit says."""
    for rank, program in enumerate(programs):
        allowed = limit if isinstance(limit, int) else limit[rank]
        for place, held in enumerate(held_residuals(program)):
            if held > allowed:
                return Verdict(
                    f"{program[place]} at {_at(rank, place)} makes it {held} residuals that rank {rank} keeps, "
                    f"and {allowed} are allowed."
                )
    return YES


def most_residuals(program: Program) -> int:
    """The most residuals that a rank keeps at any time, all its stages counted together."""
    return max(held_residuals(program), default=0)


def held_residuals(program: Program) -> list[int]:
    """The residuals that a rank keeps after each instruction."""
    kept, held = set[tuple[int, int]](), list[int]()
    for instruction in program:
        match instruction:
            case Action(stage, "F", j):
                kept.add((stage, j))
            case Action(stage, "B" | "W", j):
                kept.discard((stage, j))
            case _:
                pass
        held.append(len(kept))
    return held


def is_filled_once(programs: Sequence[Program]) -> Verdict:
    """Whether no message is received again before the first has been used."""
    for rank, program in enumerate(programs):
        full = dict[Message, str]()
        for place, instruction in enumerate(program):
            if isinstance(instruction, Receive):
                if instruction.message in full:
                    return Verdict(
                        f"{instruction} at {_at(rank, place)} fills a buffer that is in use since "
                        f"{full[instruction.message]}."
                    )
                full[instruction.message] = _at(rank, place)
            elif isinstance(instruction, Action) and (used := _used_by(instruction)):
                full.pop(used, None)
    return YES


def _used_by(action: Action) -> Message | None:
    match action.kind:
        case "F":
            return Message(action.stage - 1, "F", action.microbatch)
        case "B" | "I":
            return Message(action.stage + 1, "B", action.microbatch)
        case "W":
            return None


# -- words -------------------------------------------------------------------------------------------------------------


def _actions(programs: Sequence[Program]) -> Iterator[tuple[Action, int, str]]:
    for rank, program in enumerate(programs):
        for place, instruction in enumerate(program):
            if isinstance(instruction, Action):
                yield instruction, rank, _at(rank, place)


def _rank_of(stage: int, placement: Placement) -> int | None:
    return placement[stage] if 0 <= stage < len(placement) else None


def _at(rank: int, place: int) -> str:
    return f"rank {rank}, instruction {place}"
