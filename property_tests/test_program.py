"""Programs that run: no deadlock at any capacity, each send with its receive, one order at both ends of every link."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import WorldCase, any_schedules, built, placed_schedules, worlds

from pptrain.errors import ScheduleError
from pptrain.program import Message, Program, Receive, Send, lower
from pptrain.schedule import Action, Builder, Placement, Schedule
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


def check_runs(schedule: Schedule, cotangents: set[int], world: WorldCase) -> None:
    """The program keeps the schedule's order, and every message arrives."""
    programs = lower(schedule, world.lanes, cotangents)
    for program, actions in zip(programs, schedule.actions, strict=True):
        assert tuple(i for i in program if isinstance(i, Action)) == actions
        check_needs(program, schedule.placement, cotangents)
    check_order(programs, schedule.placement)
    check(programs, world.build(len(programs)))
    sent = Counter(i.message.carried for program in programs for i in program if isinstance(i, Send))
    crossing = {s for s in range(1, schedule.num_stages) if schedule.placement[s - 1] != schedule.placement[s]}
    m = schedule.num_microbatches
    assert (sent["F"], sent["B"]) == (len(crossing) * m, len(cotangents & crossing) * m)


@given(schedule=any_schedules(), p=st.integers(1, 6), m=st.integers(1, 8), passing=st.integers(0, 6), world=worlds())
def test_the_program_of_a_schedule_runs_in_every_world(
    schedule: str | Builder, p: int, m: int, passing: int, world: WorldCase
):
    of_p = built(schedule, p, m)
    check_runs(of_p, set(range(passing + 1, of_p.num_stages)), world)


@given(placed=placed_schedules(), world=worlds())
def test_the_program_of_stages_placed_anywhere_runs_in_every_world(placed: tuple[Schedule, set[int]], world: WorldCase):
    check_runs(*placed, world)


@given(schedule=any_schedules(), p=st.integers(2, 6), m=st.integers(1, 8), lanes=lanes, data=st.data())
def test_a_schedule_that_nobody_can_run_is_refused(
    schedule: str | Builder, p: int, m: int, lanes: Lanes, data: st.DataObject
):
    whole = built(schedule, p, m)
    rank = data.draw(st.integers(0, p - 1))
    rows = list(whole.actions)
    rows[rank] = tuple(a for a in rows[rank] if a.kind != "F")
    with pytest.raises(ScheduleError, match=f"rank {rank} stands at"):
        lower(replace(whole, actions=tuple(rows)), lanes, set(range(1, whole.num_stages)))
