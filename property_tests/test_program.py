"""Programs that run: no deadlock at any capacity, each send with its receive, one order at both ends of every link."""

from __future__ import annotations

from collections import Counter

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import PlacedSchedule, WorldCase, any_schedules, placed_schedules, unrolled, worlds

from pptrain.errors import ScheduleError
from pptrain.program import Message, Placement, Program, Receive, Send, lower
from pptrain.schedule import Action, StageSchedule
from transports import Lanes, LoopbackWorld, Task, Transport

lanes = st.sampled_from(["single", "directional"])


def identity(message: Message) -> mx.array:
    """Data by which a message can be told, whatever its label says."""
    return mx.array([message.stage, message.carried == "B", message.microbatch])


def walk(transport: Transport, program: Program) -> Task[list[Message]]:
    """Run a program's communication alone; what arrived, in the order of its receives."""
    arrived = list[Message]()
    for place, instruction in enumerate(program):
        transport.stand_at(f"{instruction} (instruction {place})")
        match instruction:
            case Send():
                yield transport.send(identity(instruction.message), instruction.to, str(instruction.message))
            case Receive():
                receive = transport.receive((3,), mx.int32, instruction.source, str(instruction.message))
                yield transport.arrive(receive)
                stage, is_backward, microbatch = receive.array.tolist()
                arrived.append(Message(stage, "B" if is_backward else "F", microbatch))
            case Action():
                pass
    yield transport.flush()
    return arrived


def check(programs: tuple[Program, ...], world: LoopbackWorld) -> None:
    """Every receive gets the very message that it names, and nobody waits for ever."""
    arrived = world.run({rank: walk(world.transport(rank), program) for rank, program in enumerate(programs)})
    for rank, program in enumerate(programs):
        assert arrived[rank] == [i.message for i in program if isinstance(i, Receive)]


def check_order(programs: tuple[Program, ...], placement: Placement) -> None:
    """The k-th sent is the k-th received on each directed link, and each message has one of both."""
    links = {(source, to) for source in range(len(programs)) for to in range(len(programs))}
    for source, to in links:
        sent = [i.message for i in programs[source] if isinstance(i, Send) and i.to == to]
        received = [i.message for i in programs[to] if isinstance(i, Receive) and i.source == source]
        assert sent == received
        assert source != to or not sent
        assert all(placement[m.stage] == source and placement[m.to_stage] == to for m in sent)
    messages = Counter(i.message for program in programs for i in program if isinstance(i, Send))
    assert set(messages.values()) <= {1}


def check_needs(program: Program, placement: Placement, cotangents: set[int]) -> None:
    """What an action needs from another rank has been received, and what it gives is sent after it, before all else."""
    last, received = len(placement) - 1, set[Message]()
    for place, instruction in enumerate(program):
        if isinstance(instruction, Receive):
            received.add(instruction.message)
        if isinstance(instruction, Send):
            message = instruction.message
            kinds = "F" if message.carried == "F" else "BI"
            assert any(Action(message.stage, kind, message.microbatch) in program[:place] for kind in kinds)
        if isinstance(instruction, Action):
            rank, stage, j = placement[instruction.stage], instruction.stage, instruction.microbatch
            if instruction.kind == "F" and stage and placement[stage - 1] != rank:
                assert Message(stage - 1, "F", j) in received
            if instruction.kind in "BI" and stage < last and placement[stage + 1] != rank:
                assert (Message(stage + 1, "B", j) in received) == (stage + 1 in cotangents)


@given(schedule=any_schedules(), p=st.integers(1, 6), m=st.integers(1, 8), passing=st.integers(0, 6), world=worlds())
def test_the_program_of_a_schedule_runs_in_every_world(
    schedule: str | StageSchedule, p: int, m: int, passing: int, world: WorldCase
):
    actions, cotangents = unrolled(schedule, p, m), set(range(passing + 1, p))
    programs = lower(actions, range(p), world.lanes, cotangents)
    for stage, program in enumerate(programs):
        assert [i for i in program if isinstance(i, Action)] == actions[stage]
        check_needs(program, range(p), cotangents)
    check_order(programs, range(p))
    sent = [i.message for program in programs for i in program if isinstance(i, Send)]
    assert Counter(message.carried for message in sent) == Counter(F=(p - 1) * m, B=len(cotangents) * m)
    check(programs, world.build(p))


@given(schedule=placed_schedules(), world=worlds())
def test_the_program_of_stages_placed_anywhere_runs_in_every_world(schedule: PlacedSchedule, world: WorldCase):
    programs = lower(schedule.actions, schedule.placement, world.lanes, schedule.cotangents)
    for rank, program in enumerate(programs):
        assert [i for i in program if isinstance(i, Action)] == schedule.actions[rank]
        check_needs(program, schedule.placement, schedule.cotangents)
    check_order(programs, schedule.placement)
    check(programs, world.build(len(programs)))


@given(schedule=any_schedules(), p=st.integers(2, 6), m=st.integers(1, 8), lanes=lanes, data=st.data())
def test_a_schedule_that_nobody_can_run_is_refused(
    schedule: str | StageSchedule, p: int, m: int, lanes: Lanes, data: st.DataObject
):
    actions = unrolled(schedule, p, m)
    stage = data.draw(st.integers(0, p - 1))
    actions[stage] = [a for a in actions[stage] if a.kind != "F"]
    with pytest.raises(ScheduleError, match=f"rank {stage} stands at"):
        lower(actions, range(p), lanes, set(range(1, p)))
