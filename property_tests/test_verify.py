"""The verifier against the definition of a right program, run in every interleaving, and against the loopback."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from by_definition import Broken, Machine, Rules
from hypothesis import given
from hypothesis import strategies as st
from strategies import Edit, WorldCase, edits, placed_schedules, worlds

from pptrain.deadlock import find_deadlock
from pptrain.program import Instruction, Message, Program, Receive, Send, lower
from pptrain.schedule import Action, Schedule
from pptrain.verify import most_residuals, verify
from transports import DeadlockError, Lanes, LoopbackWorld, Task, Transport, UndeliveredMessage

small = placed_schedules(max_ranks=3, max_more=1, max_microbatches=2)
lanes = st.sampled_from(["single", "directional"])
capacities = st.sampled_from([0, 1, 2, None])


def lowered(placed: tuple[Schedule, set[int]], lanes: Lanes) -> tuple[Program, ...]:
    return lower(placed[0], lanes, placed[1])


def edited(programs: tuple[Program, ...], mistakes: Sequence[Edit]) -> tuple[Program, ...]:
    for edit in mistakes:
        programs = edit.apply(programs)
    return programs


def holds_by_definition(rules: Rules, machine: Machine) -> bool:
    try:
        rules.check(machine)
    except Broken:
        return False
    return True


@given(placed=small, lanes=lanes, capacity=capacities, mistakes=st.lists(edits(), max_size=2))
def test_the_verifier_says_what_the_definition_says(
    placed: tuple[Schedule, set[int]], lanes: Lanes, capacity: int | None, mistakes: list[Edit]
):
    programs = edited(lowered(placed, lanes), mistakes)
    rules = Rules(placed[0].placement, placed[0].num_microbatches, placed[1])
    verdicts = verify(
        programs,
        placed[0].placement,
        placed[0].num_microbatches,
        capacity=capacity,
        lanes=lanes,
        cotangents=placed[1],
    )
    assert bool(verdicts) == holds_by_definition(rules, Machine(programs, capacity, lanes)), verdicts


@st.composite
def quarrels(draw: st.DrawFn) -> list[Program]:
    """Sends and receives in no sensible order, between two or three ranks."""
    world_size = draw(st.integers(2, 3))
    peers = st.integers(0, world_size - 1)

    def instructions(rank: int) -> st.SearchStrategy[Instruction]:
        message, other = st.builds(Message, peers, st.just("F"), st.just(0)), peers.filter(lambda peer: peer != rank)
        return st.builds(Send, message, other) | st.builds(Receive, message, other)

    return [draw(st.lists(instructions(rank), max_size=6)) for rank in range(world_size)]


@given(programs=quarrels(), lanes=lanes, capacity=capacities)
def test_all_interleavings_have_one_end_and_the_verifier_finds_it(
    programs: list[Program], lanes: Lanes, capacity: int | None
):
    machine = Machine(programs, capacity, lanes)
    [end] = machine.ends()
    assert (find_deadlock(programs, capacity, lanes) is None) == machine.has_come_to_its_end(end)


@given(programs=quarrels(), lanes=lanes, capacity=capacities)
def test_a_yes_for_capacity_0_and_one_lane_is_a_yes_for_all(
    programs: list[Program], lanes: Lanes, capacity: int | None
):
    if find_deadlock(programs, 0, "single") is None:
        assert find_deadlock(programs, capacity, lanes) is None


def walk(transport: Transport, program: Program) -> Task[list[list[int]]]:
    """Run a program's communication alone; what arrived, in the order of its receives."""
    arrived = list[list[int]]()
    for instruction in program:
        match instruction:
            case Send(message, to):
                yield transport.send(identity(message), to, str(message))
            case Receive(message, source):
                receive = transport.receive((3,), mx.int32, source, str(message))
                yield transport.arrive(receive)
                arrived.append(receive.array.tolist())
            case Action():
                pass
    yield transport.flush()
    return arrived


def identity(message: Message) -> mx.array:
    return mx.array([message.stage, message.carried == "B", message.microbatch])


def run(world: LoopbackWorld, programs: Sequence[Program]) -> bool:
    """Whether each receive of a run gets the very message that it names."""
    arrived = world.run({rank: walk(world.transport(rank), program) for rank, program in enumerate(programs)})
    named = {r: [identity(i.message).tolist() for i in p if isinstance(i, Receive)] for r, p in enumerate(programs)}
    return arrived == named


@given(placed=placed_schedules(), mistakes=st.lists(edits(["swap", "move"]), max_size=3), world=worlds())
def test_what_is_accepted_for_capacity_0_and_one_lane_runs_in_every_world(
    placed: tuple[Schedule, set[int]], mistakes: list[Edit], world: WorldCase
):
    programs = lowered(placed, "single")
    for edit in mistakes:  # As many as the verifier lets through: most programs with three are wrong.
        changed = edit.apply(programs)
        if verify(changed, placed[0].placement, placed[0].num_microbatches, cotangents=placed[1]):
            programs = changed
    assert run(world.build(len(programs)), programs)


@given(placed=placed_schedules(), lanes=lanes, mistakes=st.lists(edits(), max_size=3), world=worlds())
def test_the_loopback_comes_to_a_stand_where_the_verifier_says(
    placed: tuple[Schedule, set[int]], lanes: Lanes, mistakes: list[Edit], world: WorldCase
):
    programs = edited(lowered(placed, lanes), mistakes)
    try:
        run(world.build(len(programs)), programs)
        stands = False
    except UndeliveredMessage:  # All have come to their end; that something is left is for `matched` to say.
        stands = False
    except DeadlockError:
        stands = True
    assert (find_deadlock(programs, world.capacity, world.lanes) is not None) == stands


@given(placed=placed_schedules(), lanes=lanes)
def test_residuals_are_those_between_a_forward_and_its_backward(placed: tuple[Schedule, set[int]], lanes: Lanes):
    for program in lowered(placed, lanes):
        assert most_residuals(program) == _most_alive(program)
        limit = most_residuals(program)
        assert verify([program], (0,), residual_limit=limit).within_limit
        assert not limit or not verify([program], (0,), residual_limit=limit - 1).within_limit


def _most_alive(program: Program) -> int:
    alive = [0]
    for instruction in program:
        if isinstance(instruction, Action):
            alive.append(alive[-1] + {"F": 1, "B": -1, "I": 0, "W": -1}[instruction.kind])
    return max(alive)


actions = st.builds(Action, st.integers(0, 4), st.sampled_from("FBIW"), st.integers(0, 2))
messages = st.builds(Message, st.integers(-1, 4), st.sampled_from("FB"), st.integers(0, 2))
ranks = st.integers(-1, 4)
anything = st.lists(
    st.lists(actions | st.builds(Send, messages, ranks) | st.builds(Receive, messages, ranks), max_size=9)
)


@given(programs=anything, placement=st.lists(st.integers(0, 3), max_size=4), lanes=lanes, capacity=capacities)
def test_any_program_at_all_has_a_verdict(
    programs: list[Program], placement: list[int], lanes: Lanes, capacity: int | None
):
    verdicts = verify(programs, placement, capacity=capacity, lanes=lanes, residual_limit=1)
    assert all(words.strip() for words in verdicts.broken.values())
    assert len(str(verdicts).splitlines()) >= 7
