import itertools

import mlx.core as mx
import pytest
from pictures import action, read

from pptrain.errors import ScheduleError
from pptrain.program import Message, Receive, Send, lower, produced
from pptrain.registry import SCHEDULES
from pptrain.schedule import Action, Schedule, forward_only, loop, one_f_one_b, sequential
from transports import LoopbackWorld


def evaluation(p, m):
    return forward_only(loop(p), m)


SCHEDULES_AND_SIZES = list(itertools.product([*SCHEDULES.values(), evaluation], range(1, 6), range(1, 6)))
LANES = ["single", "directional"]


def lowered(builder, p, m, lanes, cotangents=None):
    schedule = builder(p, m)
    return lower(schedule, lanes, range(1, schedule.num_stages) if cotangents is None else cotangents)


def words(program):
    return " ".join(str(instruction) for instruction in program)


def test_with_lanes_for_each_direction_sends_follow_their_action_and_receives_stand_before_theirs():
    first, last = lowered(one_f_one_b, 2, 2, "directional")
    assert words(first) == "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"
    assert words(last) == "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"


def test_on_a_single_lane_each_rank_runs_its_part_of_one_sequence_of_pairs():
    first, last = lowered(one_f_one_b, 2, 2, "single")
    assert words(first) == "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"
    assert words(last) == "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1"


def test_a_stage_in_the_middle_receives_and_sends_both_ways():
    _, middle, _ = lowered(sequential, 3, 1, "directional")
    assert words(middle) == "1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0"


@pytest.mark.parametrize("lanes", LANES)
def test_one_stage_sends_nothing(lanes):
    [program] = lowered(one_f_one_b, 1, 3, lanes)
    assert words(program) == "0F0 0B0 0F1 0B1 0F2 0B2"


@pytest.mark.parametrize("lanes", LANES)
def test_a_cotangent_that_nobody_needs_is_not_sent(lanes):
    programs = lowered(one_f_one_b, 3, 2, lanes, cotangents={2})
    sent = [str(i) for program in programs for i in program if isinstance(i, Send) and i.message.carried == "B"]
    assert sent == ["2SEND_B0", "2SEND_B1"]
    assert not any(isinstance(i, Receive) for i in programs[0])


@pytest.mark.parametrize("lanes", LANES)
def test_stages_of_one_rank_send_each_other_nothing(lanes):
    programs = lower(Schedule("", 1, (0, 0, 1), ((action("0F0"), action("1F0")), (action("2F0"),))), lanes, ())
    assert [words(program) for program in programs] == ["0F0 1F0 1SEND_F0", "2RECV_F0 2F0"]


@pytest.mark.parametrize("lanes", LANES)
def test_a_split_backward_hands_its_cotangent_down_after_the_input_part(lanes):
    first, last = lower(read("F0 .  .  I0 W0\n.  F0 I0 W0"), lanes, {1})
    assert words(first) == "0F0 0SEND_F0 0RECV_B0 0I0 0W0"
    assert words(last) == "1RECV_F0 1F0 1I0 1SEND_B0 1W0"


def test_what_an_action_produces():
    placement, cotangents = (0, 1, 1), {1, 2}
    assert produced(Action(0, "F", 3), placement, cotangents) == Message(0, "F", 3)
    assert produced(Action(1, "B", 3), placement, cotangents) == Message(1, "B", 3)
    assert produced(Action(1, "I", 3), placement, cotangents) == Message(1, "B", 3)
    for nothing in (Action(1, "W", 3), Action(1, "F", 3), Action(2, "F", 3), Action(2, "B", 3), Action(0, "B", 3)):
        assert produced(nothing, placement, cotangents) is None
    assert produced(Action(1, "B", 3), placement, {2}) is None


def test_actions_that_wait_for_each_other_are_refused():
    with pytest.raises(ScheduleError, match=r"rank 0 stands at 0B0"):
        lower(read("B0 F0\nF0 B0"), "single", {1})


@pytest.mark.parametrize("lanes", LANES)
def test_every_link_has_the_same_order_at_both_ends(lanes):
    for schedule, p, m in SCHEDULES_AND_SIZES:
        programs = lowered(schedule, p, m, lanes)
        for source, to in itertools.permutations(range(p), 2):
            sent = [i.message for i in programs[source] if isinstance(i, Send) and i.to == to]
            received = [i.message for i in programs[to] if isinstance(i, Receive) and i.source == source]
            assert sent == received
            assert len(set(sent)) == len(sent)


@pytest.mark.parametrize("lanes", LANES)
def test_lowering_keeps_every_action_and_its_order(lanes):
    for schedule, p, m in SCHEDULES_AND_SIZES:
        for program, actions in zip(lowered(schedule, p, m, lanes), schedule(p, m).actions, strict=True):
            assert tuple(i for i in program if isinstance(i, Action)) == actions


@pytest.mark.parametrize("lanes", LANES)
def test_a_message_is_there_before_the_action_that_needs_it(lanes):
    for builder, p, m in SCHEDULES_AND_SIZES:
        schedule = builder(p, m)
        for rank, program in enumerate(lowered(builder, p, m, lanes)):
            place = {str(instruction): i for i, instruction in enumerate(program)}
            for s, j in itertools.product(schedule.stages(rank), range(m)):
                forward, backward = place[f"{s}F{j}"], place.get(f"{s}B{j}", place.get(f"{s}I{j}"))
                if s and schedule.placement[s - 1] != rank:
                    assert place[f"{s}RECV_F{j}"] < forward
                if s < schedule.num_stages - 1 and schedule.placement[s + 1] != rank:
                    assert forward < place[f"{s}SEND_F{j}"]
                    assert backward is None or place[f"{s}RECV_B{j}"] < backward


def number(message):
    return 100 * message.stage + 10 * message.microbatch + (message.carried == "B")


def run(transport, program, received):
    """An executor that moves one number a message and computes nothing."""
    for place, instruction in enumerate(program):
        transport.stand_at(f"{instruction} (instruction {place})")
        match instruction:
            case Send(message, to):
                yield transport.send(mx.array(number(message)), to, str(message))
            case Receive(message, source):
                incoming = transport.receive((), mx.int32, source, str(message))
                yield transport.arrive(incoming)
                received.append(incoming.array.item() == number(message))


@pytest.mark.parametrize(
    ("lanes", "capacity"), [("single", 0), ("single", None), ("directional", 0), ("directional", 1)]
)
def test_no_program_deadlocks_or_mixes_messages_up(lanes, capacity):
    for seed, (schedule, p, m) in enumerate(SCHEDULES_AND_SIZES):
        world, received = LoopbackWorld(p, capacity=capacity, lanes=lanes, seed=seed), list[bool]()
        programs = lowered(schedule, p, m, lanes)
        world.run({rank: run(world.transport(rank), programs[rank], received) for rank in range(p)})
        assert all(received)
        crossing = sum(a != b for a, b in itertools.pairwise(schedule(p, m).placement))
        assert len(received) == crossing * m * (1 if schedule is evaluation else 2)
