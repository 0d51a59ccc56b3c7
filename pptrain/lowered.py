"""When a program with its sends and receives would run, under the lanes that it was lowered for.

The schedule alone says when actions could run; what a single lane adds, in which a rank waits at the head of the line,
is the difference between `makespan` here and that of `simulate`.
"""

from __future__ import annotations

from collections.abc import Sequence

from pptrain.errors import ScheduleError
from pptrain.program import Instruction, Message, Program, Receive, Send
from pptrain.schedule import Action
from pptrain.simulate import Costs, Span
from transports import Lanes


def time_program(programs: Sequence[Program], costs: Costs, lanes: Lanes) -> list[list[Span]]:
    """Each rank's actions, and when they run.

    A directional lane takes a message at once, and a receive waits until it has travelled. On a single lane both ends
    of a message wait for each other and are busy while it travels, as where nothing is buffered.

    Raises:
        ScheduleError: If no rank can go on.
    """
    run = _Run(programs, costs, lanes)
    while any(run.advance(rank) for rank in range(len(programs))):
        pass
    if stuck := [f"rank {rank} at {run.head(rank)}" for rank in range(len(programs)) if run.head(rank)]:
        raise ScheduleError(f"[program] No rank can go on: {', '.join(stuck)}. Verify the program first.")
    return run.spans


def makespan(spans: Sequence[Sequence[Span]]) -> float:
    """The end of the last action."""
    return max((span.end for row in spans for span in row), default=0.0)


class _Run:
    def __init__(self, programs: Sequence[Program], costs: Costs, lanes: Lanes) -> None:
        self.spans: list[list[Span]] = [[] for _ in programs]
        self._programs, self._costs, self._lanes = programs, costs, lanes
        self._heads, self._now = [0] * len(programs), [0.0] * len(programs)
        self._arrives = dict[Message, float]()

    def head(self, rank: int) -> Instruction | None:
        """The instruction that a rank stands at; none at its end."""
        program, at = self._programs[rank], self._heads[rank]
        return program[at] if at < len(program) else None

    def advance(self, rank: int) -> bool:
        """Run what a rank can run; returns whether that was anything."""
        began = self._heads[rank]
        while (instruction := self.head(rank)) is not None and self._step(rank, instruction):
            self._heads[rank] += 1
        return self._heads[rank] > began

    def _step(self, rank: int, instruction: Instruction) -> bool:
        match instruction:
            case Action():
                start = self._now[rank]
                self._now[rank] = start + self._costs.of(instruction)
                self.spans[rank].append(Span(instruction, start, self._now[rank]))
                return True
            case Send() if self._lanes == "directional":
                self._arrives[instruction.message] = self._now[rank] + self._costs.between(rank, instruction.to)
                return True
            case Send():
                return self._meet(rank, instruction)
            case Receive():
                if instruction.message not in self._arrives:
                    return False
                self._now[rank] = max(self._now[rank], self._arrives[instruction.message])
                return True

    def _meet(self, rank: int, send: Send) -> bool:
        """Both ends stand at the message: it travels, and both are busy until it is there."""
        other = self.head(send.to)
        if not isinstance(other, Receive) or other.message != send.message:
            return False
        start = max(self._now[rank], self._now[send.to])
        self._now[rank] = self._arrives[send.message] = start + self._costs.between(rank, send.to)
        return True
