"""The schedule with its sends and receives: one list of instructions for each rank, lowered for the transport's lanes.

A **single lane** does one communication at a time and blocks its rank. Every (send, receive) pair is put atomically
into one global sequence, ordered by when its message is ready, and each rank runs its projection of that sequence. No
such program deadlocks, whatever the buffering: of all pairs that are not done, the first in the sequence has nothing
before it on either side. The same order stands at both ends of every link, so that no tag is needed.

With **one lane for each direction** a message is sent when it is produced and received as late as can be: before the
action that needs it, or before a message behind it on the same link has to be received.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from pptrain.schedule import Action, Kind, Placement, Schedule
from pptrain.simulate import Span, simulate
from transports import Lanes

Carried = Literal["F", "B"]
"""What a message carries: a boundary going forward, or a cotangent going backward."""


@dataclass(frozen=True, slots=True)
class Message:
    """What one stage hands to its neighbour: an activation (`F`) to the next, a cotangent (`B`) to the one before."""

    stage: int
    carried: Carried
    microbatch: int

    @property
    def to_stage(self) -> int:
        """The stage that needs it."""
        return self.stage + 1 if self.carried == "F" else self.stage - 1

    def __str__(self) -> str:
        return f"{self.stage}{self.carried}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Send:
    """Hand a message to the transport."""

    message: Message
    to: int

    def __str__(self) -> str:
        return f"{self.message.stage}SEND_{self.message.carried}{self.message.microbatch}"


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for a message."""

    message: Message
    source: int

    def __str__(self) -> str:
        return f"{self.message.to_stage}RECV_{self.message.carried}{self.message.microbatch}"


Instruction = Action | Send | Receive
Program = list[Instruction]

_PRODUCED: dict[Kind, Carried | None] = {"F": "F", "B": "B", "I": "B", "W": None}


def lower(schedule: Schedule, lanes: Lanes, cotangents: Collection[int]) -> tuple[Program, ...]:
    """Put sends and receives into a schedule.

    Args:
        schedule: Each rank's actions, in order.
        lanes: How the transport communicates.
        cotangents: Stages whose cotangent somebody below needs; the others send none (nothing below them trains).

    Returns:
        The program of each rank.

    Raises:
        ScheduleError: If the actions cannot be run in their order.
    """
    timing = simulate(schedule)  # Whatever the lanes, this is where a schedule that cannot run is found.
    if lanes == "single":
        return _single_lane(timing.spans, schedule.num_ranks, schedule.placement, cotangents)
    return _directional(schedule.actions, schedule.placement, cotangents)


def produced(action: Action, placement: Placement, cotangents: Collection[int]) -> Message | None:
    """The message that an action gives to another rank, if any."""
    carried = _PRODUCED[action.kind]
    if carried is None or (carried == "B" and action.stage not in cotangents):
        return None
    message = Message(action.stage, carried, action.microbatch)
    if not 0 <= message.to_stage < len(placement) or placement[message.to_stage] == placement[action.stage]:
        return None
    return message


def _single_lane(
    ran: Sequence[Span], num_ranks: int, placement: Placement, cotangents: Collection[int]
) -> tuple[Program, ...]:
    programs: tuple[Program, ...] = tuple([] for _ in range(num_ranks))
    # A message ready at time t stands before an action that starts at t, which may need it.
    events: list[tuple[float, int, Action | Message]] = []
    for span in ran:
        events.append((span.start, 1, span.action))
        if message := produced(span.action, placement, cotangents):
            events.append((span.end, 0, message))
    for _, _, event in sorted(events, key=lambda event: event[:2]):
        if isinstance(event, Action):
            programs[placement[event.stage]].append(event)
        else:
            source, to = placement[event.stage], placement[event.to_stage]
            programs[source].append(Send(event, to))
            programs[to].append(Receive(event, source))
    return programs


def _directional(
    lists: Sequence[Sequence[Action]], placement: Placement, cotangents: Collection[int]
) -> tuple[Program, ...]:
    links = dict[tuple[int, int], list[Message]]()
    for rank, actions in enumerate(lists):
        for action in actions:
            if message := produced(action, placement, cotangents):
                links.setdefault((rank, placement[message.to_stage]), []).append(message)
    return tuple(_receive_late(rank, actions, placement, cotangents, links) for rank, actions in enumerate(lists))


def _receive_late(
    rank: int,
    actions: Sequence[Action],
    placement: Placement,
    cotangents: Collection[int],
    links: dict[tuple[int, int], list[Message]],
) -> Program:
    program, waiting = Program(), {source: list(sent) for (source, to), sent in links.items() if to == rank}
    for action in actions:
        needed = _consumed(action)
        source = placement[needed.stage] if needed and 0 <= needed.stage < len(placement) else rank
        # Everything that stands before the needed message on its link has to come off the link first.
        while needed in waiting.get(source, ()):
            program.append(Receive(waiting[source].pop(0), source))
        program.append(action)
        if message := produced(action, placement, cotangents):
            program.append(Send(message, placement[message.to_stage]))
    return program


def _consumed(action: Action) -> Message | None:
    if action.kind == "F":
        return Message(action.stage - 1, "F", action.microbatch)
    if action.kind in ("B", "I"):
        return Message(action.stage + 1, "B", action.microbatch)
    return None
