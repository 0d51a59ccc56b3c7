"""The only loop: takes instructions, calls stages and transport. It knows no formula and no backend.

A run is a generator that yields wherever a real rank could wait. In the loopback the simulated world resumes it; over
processes each wait blocks. MLX evaluates here and in the transports only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import mlx.core as mx

from pptrain.errors import ScheduleError
from pptrain.model import Boundary, Specs
from pptrain.program import Message, Program, Receive, Send
from pptrain.schedule import Action, Placement
from pptrain.segment import Work
from pptrain.simulate import Span
from pptrain.stage import Parts, Stage
from transports import BufferReceive, Task, Transport
from transports import Receive as Incoming
from transports.buffers import bytes_of, fill, poisoned


def materialize(*trees: Any) -> None:
    """Evaluate arrays, in trees or not: weights when they are loaded, parameters and moments after an update."""
    mx.eval(*trees)


def materialize_each(arrays: Iterable[mx.array]) -> None:
    """Evaluate arrays one after the other, so that what one is made from is let go of before the next is read.

    Together, MLX would first read all parts of several arrays: experts that are stacked when they are loaded.
    """
    for array in arrays:
        mx.eval(array)


class Executor:
    """Runs one rank's program over its stages."""

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, Stage],
        placement: Placement,
        transport: Transport,
        keep: bool = True,
    ) -> None:
        self._program, self._stages, self._placement, self._transport = program, stages, placement, transport
        self._keep = keep
        self._incoming = dict[Message, Sequence[Incoming]]()
        self._outgoing = dict[Message, Boundary]()
        self._received = set[Message]()
        self.spans = list[Span]()

    def run(self, works: Sequence[Work]) -> Task[None]:
        """Execute every instruction in order.

        Args:
            works: The step's microbatches.

        Yields:
            Every wait.

        Raises:
            ScheduleError: If an action comes before what it needs.
        """
        for place, instruction in enumerate(self._program):
            start = self._transport.clock()  # Before it is told: a simulated world lets given durations pass there.
            self._transport.stand_at(f"{instruction} (instruction {place})")
            match instruction:
                case Send():
                    for array in self._outgoing.pop(instruction.message):
                        yield self._transport.send(array, instruction.to, str(instruction.message))
                case Receive():
                    for incoming in self._expect(instruction.message, works):
                        yield self._transport.arrive(incoming)
                    self._received.add(instruction.message)
                case Action():
                    self._act(instruction, works)
                    self.spans.append(Span(instruction, start, self._transport.clock()))
        yield self._transport.flush()

    def _act(self, action: Action, works: Sequence[Work]) -> None:
        stage = self._stages[action.stage]
        match action.kind:
            case "F":
                self._forward(stage, works[action.microbatch], works)
            case "B":
                _evaluate(stage.backward(action.microbatch, self._cotangents(stage, action)))
                self._hand_down(stage, action)
            case "I":
                _evaluate(stage.backward_input(action.microbatch, self._cotangents(stage, action)))
                self._hand_down(stage, action)
            case "W":
                _evaluate(stage.backward_weights(action.microbatch))

    def _forward(self, stage: Stage, work: Work, works: Sequence[Work]) -> None:
        boundary = [] if stage.is_first else self._take(Message(stage.stage - 1, "F", work.index))
        cotangents = Boundary()
        if self._keep and stage.trains and not stage.is_last:
            # Bound into the graph now; their data come with a later instruction.
            cotangents = [incoming.array for incoming in self._expect(Message(stage.stage + 1, "B", work.index), works)]
        outputs = stage.forward(work, boundary, cotangents, self._keep)
        # Only the outputs: the backward's parts of the same graph wait for their own actions.
        mx.eval(*outputs)
        if not stage.is_last:
            self._hand_over(Message(stage.stage, "F", work.index), outputs)

    def _cotangents(self, stage: Stage, action: Action) -> Boundary:
        if stage.is_last or not stage.trains:
            return []
        return self._take(Message(stage.stage + 1, "B", action.microbatch))

    def _hand_down(self, stage: Stage, action: Action) -> None:
        if stage.passes_cotangent:
            cotangents = stage.take_input_cotangents(action.microbatch)
            self._hand_over(Message(stage.stage, "B", action.microbatch), cotangents)

    def _hand_over(self, message: Message, arrays: Boundary) -> None:
        """Keep what the transport will be given to send; what another stage of this rank needs is there at once."""
        if self._placement[message.to_stage] != self._transport.rank:
            self._outgoing[message] = arrays
            return
        self._received.add(message)
        if message in self._incoming:  # built into a graph already, as cotangents are
            for incoming, array in zip(self._incoming[message], arrays, strict=True):
                fill(incoming.array, bytes_of(array))
        else:
            self._incoming[message] = [BufferReceive(array, self._transport.rank, str(message)) for array in arrays]

    def _expect(self, message: Message, works: Sequence[Work]) -> Sequence[Incoming]:
        """The receives of a message, made when somebody first needs its arrays."""
        if message not in self._incoming:
            specs = self._specs(message, works[message.microbatch])
            self._incoming[message] = [self._receive(message, spec.shape, spec.dtype) for spec in specs]
        return self._incoming[message]

    def _receive(self, message: Message, shape: Sequence[int], dtype: mx.Dtype) -> Incoming:
        source, label = self._placement[message.stage], str(message)
        if source == self._transport.rank:
            return BufferReceive(poisoned(shape, dtype), source, label)
        return self._transport.receive(shape, dtype, source, label)

    def _specs(self, message: Message, work: Work) -> Specs:
        stage = self._stages[message.to_stage]
        return stage.specs_in(work) if message.carried == "F" else stage.specs_back(work)

    def _take(self, message: Message) -> Boundary:
        if message not in self._received:
            raise ScheduleError(
                f"[executor] {message} is needed before its receive. Expected a program that `lower` made. "
                "Put the receive before the action."
            )
        self._received.discard(message)
        return [incoming.array for incoming in self._incoming.pop(message)]


def _evaluate(parts: Parts) -> None:
    for arrays in parts:
        if arrays:
            mx.eval(*arrays)
