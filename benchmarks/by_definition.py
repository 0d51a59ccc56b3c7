"""What a right program is, by running it in every interleaving: the slow definition that the verifier is held to.

Nothing here is shared with `pptrain.verify`, and nothing is clever: a state is where each rank stands and what lies in
each queue and on each wire; every state that can be reached is visited, and every rule is checked where it applies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from pptrain.program import Instruction, Message, Program, Receive, Send
from pptrain.schedule import Action, Placement
from transports import Lanes

Pair = tuple[int, int]
Contents = tuple[tuple[Pair, tuple[Message, ...]], ...]


class Broken(Exception):
    """A rule that does not hold."""


@dataclass(frozen=True)
class State:
    """Where each rank stands, what waits in each queue, and what lies on each wire."""

    places: tuple[int, ...]
    queues: Contents = ()
    wires: Contents = ()


@dataclass(frozen=True)
class Step:
    """What happens, and the state after it."""

    after: State
    rank: int
    did: Instruction | None
    """None where a message moves from a queue to a wire."""
    took: Message | None = None
    """What a receive got, whatever it asked for."""


@dataclass(frozen=True)
class Machine:
    """Programs over links of a capacity."""

    programs: Sequence[Program]
    capacity: int | None
    lanes: Lanes

    def start(self) -> State:
        """Every rank at its beginning."""
        return State((0,) * len(self.programs))

    def steps(self, state: State) -> Iterator[Step]:
        """All that can happen next."""
        for rank in range(len(self.programs)):
            yield from self._instruction(state, rank)
        for link, queue in state.queues:
            if self._has_room(state, link):
                moved = replace(state, queues=_popped(state.queues, link), wires=_put(state.wires, link, queue[0]))
                yield Step(moved, link[0], None)

    def ends(self) -> set[State]:
        """Every state after which nothing can happen."""
        seen, stack, found = {self.start()}, [self.start()], set[State]()
        while stack:
            state = stack.pop()
            after = {step.after for step in self.steps(state)}
            if not after:
                found.add(state)
            stack += after - seen
            seen |= after
        return found

    def has_come_to_its_end(self, state: State) -> bool:
        """Whether every rank has done everything and has nothing left to send."""
        return not state.queues and all(self._at(state, rank) is None for rank in range(len(self.programs)))

    def _instruction(self, state: State, rank: int) -> Iterator[Step]:
        match instruction := self._at(state, rank):
            case None:
                pass
            case Action():
                yield Step(_moved(state, rank), rank, instruction)
            case Send(message, to) if self.lanes == "directional":
                queues = _put(state.queues, (rank, to), message)
                yield Step(replace(_moved(state, rank), queues=queues), rank, instruction)
            case Send(message, to) if self._has_room(state, (rank, to)):
                yield Step(
                    replace(_moved(state, rank), wires=_put(state.wires, (rank, to), message)), rank, instruction
                )
            case Send():
                pass  # Without a wire it is the receiver's step.
            case Receive(_, source):
                yield from self._receive(state, rank, source, instruction)

    def _receive(self, state: State, rank: int, source: int, receive: Receive) -> Iterator[Step]:
        link, after = (source, rank), _moved(state, rank)
        if wire := dict(state.wires).get(link):
            yield Step(replace(after, wires=_popped(state.wires, link)), rank, receive, wire[0])
        if self.capacity != 0:
            return
        if queue := dict(state.queues).get(link):
            yield Step(replace(after, queues=_popped(state.queues, link)), rank, receive, queue[0])
        other = self._at(state, source)
        if self.lanes == "single" and isinstance(other, Send) and other.to == rank and source != rank:
            yield Step(_moved(after, source), rank, receive, other.message)

    def _has_room(self, state: State, link: Pair) -> bool:
        return self.capacity is None or len(dict(state.wires).get(link, ())) < self.capacity

    def _at(self, state: State, rank: int) -> Instruction | None:
        if not 0 <= rank < len(self.programs) or state.places[rank] == len(self.programs[rank]):
            return None
        return self.programs[rank][state.places[rank]]


@dataclass(frozen=True)
class Rules:
    """What must hold at every step and at the end."""

    placement: Placement
    num_microbatches: int
    cotangents: Collection[int]
    is_training: bool = True

    def check(self, machine: Machine) -> None:
        """Visit everything.

        Raises:
            Broken: If a rule does not hold somewhere.
        """
        seen, stack = {machine.start()}, [machine.start()]
        while stack:
            state, is_last = stack.pop(), True
            history = [program[:place] for program, place in zip(machine.programs, state.places, strict=True)]
            for rank, program in enumerate(machine.programs):
                if state.places[rank] < len(program) and isinstance(send := program[state.places[rank]], Send):
                    self._check_send(rank, send, history)
            for step in machine.steps(state):
                is_last = False
                self._check_step(step, history)
                if step.after not in seen:
                    seen.add(step.after)
                    stack.append(step.after)
            if is_last:
                self._check_end(state, machine, history)

    def _check_step(self, step: Step, history: Sequence[Program]) -> None:
        match step.did:
            case Action():
                self._check_action(step.rank, step.did, history)
            case Receive(message, source):
                if step.took != message:
                    raise Broken(f"{step.did} takes {step.took}")
                self._check_edge(message, source, step.rank)
                if step.did in history[step.rank]:
                    raise Broken(f"{step.did} again")
            case _:
                pass

    def _check_send(self, rank: int, send: Send, history: Sequence[Program]) -> None:
        self._check_edge(send.message, rank, send.to)
        if not self._is_made(send.message, history[rank]):
            raise Broken(f"{send} has nothing to send")

    def _check_edge(self, message: Message, source: int, to: int) -> None:
        stages = range(len(self.placement))
        if message.stage not in stages or message.to_stage not in stages:
            raise Broken(f"{message} is no edge")
        if (self.placement[message.stage], self.placement[message.to_stage]) != (source, to) or source == to:
            raise Broken(f"{message} does not go from {source} to {to}")
        if message.carried == "B" and message.stage not in self.cotangents:
            raise Broken(f"{message} is for nobody")

    def _check_action(self, rank: int, action: Action, history: Sequence[Program]) -> None:
        stage, j, own = action.stage, action.microbatch, history[rank]
        if self.placement[stage] != rank or action in own:
            raise Broken(f"{action} astray or again")
        needed = list[Message]()
        if action.kind == "F" and stage > 0:
            needed = [Message(stage - 1, "F", j)]
        if action.kind in "BI" and stage + 1 < len(self.placement) and stage + 1 in self.cotangents:
            needed = [Message(stage + 1, "B", j)]
        for message in needed:
            source = self.placement[message.stage]
            if not self._is_made(message, history[source]):
                raise Broken(f"{action} before {message}")
            if source != rank and Receive(message, source) not in own:
                raise Broken(f"{action} before {message} has come")
        if action.kind in "BI" and Action(stage, "F", j) not in own:
            raise Broken(f"{action} before its forward")
        if action.kind == "W" and Action(stage, "I", j) not in own:
            raise Broken(f"{action} before its input part")

    def _is_made(self, message: Message, history: Program) -> bool:
        kinds = "F" if message.carried == "F" else "BI"
        return any(Action(message.stage, kind, message.microbatch) in history for kind in kinds)

    def _check_end(self, state: State, machine: Machine, history: Sequence[Program]) -> None:
        if not machine.has_come_to_its_end(state):
            raise Broken("deadlock")
        if state.wires:
            raise Broken("a message is left")
        allowed = [["B", "F"], ["F", "I", "W"]] if self.is_training else [["F"]]
        done = [i for program in history for i in program if isinstance(i, Action)]
        for stage in range(len(self.placement)):
            for j in range(self.num_microbatches):
                if sorted(a.kind for a in done if (a.stage, a.microbatch) == (stage, j)) not in allowed:
                    raise Broken(f"stage {stage}, microbatch {j} is not complete")


def _moved(state: State, rank: int) -> State:
    return replace(state, places=(*state.places[:rank], state.places[rank] + 1, *state.places[rank + 1 :]))


def _put(contents: Contents, link: Pair, message: Message) -> Contents:
    lists = dict(contents)
    lists[link] = (*lists.get(link, ()), message)
    return tuple(sorted(lists.items(), key=lambda item: item[0]))


def _popped(contents: Contents, link: Pair) -> Contents:
    lists = dict(contents)
    lists[link] = lists[link][1:]
    return tuple((pair, messages) for pair, messages in sorted(lists.items(), key=lambda item: item[0]) if messages)
