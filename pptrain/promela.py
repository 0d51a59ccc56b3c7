"""Writes a program as a model in Promela, so that the model checker SPIN can judge it without any code of ours.

One process a rank, one channel a directed link, the capacity as given. With directional lanes a rank's sends go into a
queue, and one more process for each peer carries them from there to the link. What the model claims, in assertions:

- an action runs once, on its rank, after what it needs has run and, if that was on another rank, has been received;
- a send comes after the action that makes its message, and goes along an edge that there is;
- a receive finds the message that it names, and finds it once;
- at a rank's end every action of its stages has run.

The rest is SPIN's own: an invalid end state is a deadlock, and a message that nobody takes is left in a channel. To
judge a model (`-q` for what is left in channels; `-A` leaves the assertions out, and what is left is deadlock alone)::

    spin -a model.pml && gcc -DSAFETY -o pan pan.c && ./pan -q

Source: Holzmann 1997, The model checker SPIN; https://spinroot.com/spin/Man/promela.html
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from pptrain.program import Message, Program, Receive, Send
from pptrain.schedule import Action, Placement
from transports import Lanes

_MOST_SLOTS = 255
"""What SPIN allows in one channel."""


def promela(
    programs: Sequence[Program],
    placement: Placement,
    num_microbatches: int,
    *,
    capacity: int | None = 0,
    lanes: Lanes = "single",
    cotangents: Collection[int] | None = None,
    is_training: bool = True,
) -> str:
    """The model of a program.

    Args:
        programs: The program of each rank.
        placement: The rank of each stage.
        num_microbatches: How many a step has.
        capacity: How many messages a link holds; None for any number.
        lanes: How a rank communicates.
        cotangents: Stages whose cotangent somebody below needs; all but the first if not given.
        is_training: Whether there are backwards at all.

    Raises:
        ValueError: If a link would have to hold more messages than a channel of SPIN can.
    """
    if cotangents is None:
        cotangents = range(1, len(placement))
    model = _Model(programs, placement, num_microbatches, capacity, lanes, cotangents, is_training)
    return "\n".join(model.lines()) + "\n"


class _Model:
    def __init__(
        self,
        programs: Sequence[Program],
        placement: Placement,
        num_microbatches: int,
        capacity: int | None,
        lanes: Lanes,
        cotangents: Collection[int],
        is_training: bool,
    ) -> None:
        self._programs, self._placement, self._num_microbatches = programs, placement, num_microbatches
        self._capacity, self._lanes, self._cotangents, self._is_training = capacity, lanes, cotangents, is_training
        self._sent = Counter((r, i.to) for r, program in enumerate(programs) for i in program if isinstance(i, Send))

    def lines(self) -> Iterator[str]:
        room = "any number of messages" if self._capacity is None else f"{self._capacity} messages"
        yield f"/* {len(self._programs)} ranks, {self._lanes} lanes, links for {room}; rank of each stage: "
        yield f"   {', '.join(map(str, self._placement))}. Written by pptrain. */"
        yield from self._declarations()
        for rank, program in enumerate(self._programs):
            yield f"\nactive proctype rank_{rank}() {{"
            yield "  short got;"
            for place, instruction in enumerate(program):
                yield f"  /* {place}: {instruction} */ {'; '.join(self._statements(rank, instruction))};"
            yield f"  /* the end */ {'; '.join([*self._all_done(rank), 'skip'])}"
            yield "}"
        if self._lanes == "directional":
            for source, to in sorted(self._sent):
                yield from self._sender(source, to)

    def _declarations(self) -> Iterator[str]:
        links, messages = set(self._sent), set[Message]()
        for rank, program in enumerate(self._programs):
            for instruction in program:
                if isinstance(instruction, Send | Receive):
                    messages.add(instruction.message)
                if isinstance(instruction, Receive):
                    links.add((instruction.source, rank))
        in_order = sorted(messages, key=lambda message: (message.stage, message.carried, message.microbatch))
        for number, message in enumerate(in_order, start=1):
            yield f"#define {_name(message)} {number}"
        for source, to in sorted(links):
            yield f"chan link_{source}_{to} = [{self._room(source, to)}] of {{ short }};"
            if self._lanes == "directional" and (source, to) in self._sent:
                yield f"chan queue_{source}_{to} = [{_slots(self._sent[source, to])}] of {{ short }};"
        for stage in range(len(self._placement)):
            for j in range(self._num_microbatches):
                yield f"bool {', '.join(f'ran_{stage}{kind}{j}' for kind in 'FBIW')};"
        for message in in_order:
            yield f"bool {_taken(message)};"

    def _room(self, source: int, to: int) -> int:
        most = max(1, self._sent[source, to])  # More room than there are messages changes nothing.
        return _slots(most if self._capacity is None else min(self._capacity, most))

    def _statements(self, rank: int, instruction: Action | Send | Receive) -> Iterator[str]:
        match instruction:
            case Action():
                yield from self._act(rank, instruction)
            case Send(message, to):
                yield f"assert({_made(message) if self._goes(message, rank, to) else 'false'})"
                yield f"{'link' if self._lanes == 'single' else 'queue'}_{rank}_{to}!{_name(message)}"
            case Receive(message, source):
                right = f"got == {_name(message)} && !{_taken(message)}"
                yield f"link_{source}_{rank}?got"
                yield f"assert({right if self._goes(message, source, rank) else 'false'})"
                yield f"{_taken(message)} = true"

    def _act(self, rank: int, action: Action) -> Iterator[str]:
        if self._rank(action.stage) != rank or not 0 <= action.microbatch < self._num_microbatches:
            yield "assert(false)"
            return
        conditions = [f"!ran_{action}", *self._conditions(rank, action)]
        yield f"atomic {{ assert({' && '.join(conditions)}); ran_{action} = true }}"

    def _conditions(self, rank: int, action: Action) -> Iterator[str]:
        stage, j = action.stage, action.microbatch
        match action.kind:
            case "F":
                if stage > 0:
                    yield self._come(rank, Message(stage - 1, "F", j))
            case "B" | "I":
                yield f"ran_{stage}F{j}"
                if stage + 1 < len(self._placement) and stage + 1 in self._cotangents:
                    yield self._come(rank, Message(stage + 1, "B", j))
            case "W":
                yield f"ran_{stage}I{j}"

    def _come(self, rank: int, message: Message) -> str:
        """That a message's data have come to a rank."""
        if self._rank(message.stage) == rank:
            return _made(message)
        # A message that no instruction takes has no variable.
        taken = any(isinstance(i, Receive) and i.message == message for i in self._programs[rank])
        return f"{_made(message)} && {_taken(message) if taken else 'false'}"

    def _all_done(self, rank: int) -> Iterator[str]:
        for stage, place in enumerate(self._placement):
            for j in range(self._num_microbatches) if place == rank else ():
                f, b, i, w = (f"ran_{stage}{kind}{j}" for kind in "FBIW")
                backward = f"(({b} && !{i} && !{w}) || (!{b} && {i} && {w}))"
                yield f"assert({f} && {backward if self._is_training else f'!({b} || {i} || {w})'})"

    def _sender(self, source: int, to: int) -> Iterator[str]:
        yield f"\nactive proctype sender_{source}_{to}() {{"
        yield "  short message, i;"
        yield f"  do :: i < {self._sent[source, to]} -> queue_{source}_{to}?message; link_{source}_{to}!message; i++"
        yield "     :: else -> break od"
        yield "}"

    def _goes(self, message: Message, source: int, to: int) -> bool:
        """Whether a message goes from one rank to another: its stages lie there, and somebody needs it."""
        if source == to or not 0 <= message.microbatch < self._num_microbatches:
            return False
        needed = message.carried == "F" or message.stage in self._cotangents
        return needed and (self._rank(message.stage), self._rank(message.to_stage)) == (source, to)

    def _rank(self, stage: int) -> int | None:
        return self._placement[stage] if 0 <= stage < len(self._placement) else None


def _name(message: Message) -> str:
    return f"message_{message}"


def _taken(message: Message) -> str:
    return f"took_{message}"


def _made(message: Message) -> str:
    stage, j = message.stage, message.microbatch
    return f"ran_{stage}F{j}" if message.carried == "F" else f"(ran_{stage}B{j} || ran_{stage}I{j})"


def _slots(number: int) -> int:
    if number > _MOST_SLOTS:
        raise ValueError(
            f"A link has {number} messages, and a channel of SPIN holds {_MOST_SLOTS}. Use fewer microbatches."
        )
    return number
