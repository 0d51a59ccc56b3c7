import itertools
import re

import pytest

from pptrain.deadlock import find_deadlock
from pptrain.notation import parse_program, placement_of
from pptrain.program import Message, Receive, Send, lower
from pptrain.registry import SCHEDULES
from pptrain.schedule import Action, forward_only, gpipe, one_f_one_b, sequential
from pptrain.verify import Verdict, held_residuals, most_residuals, verify

WORLDS = list(itertools.product(["single", "directional"], [0, 1, 2, None]))

# 1F1B, two stages, one microbatch: right as it stands.
RIGHT = """\
0F0,0SEND_F0,0RECV_B0,0B0
1RECV_F0,1F0,1B0,1SEND_B0
"""


def judge(text, placement=None, **more):
    programs = parse_program(text, placement)
    return verify(programs, placement or placement_of(programs), **more)


def broken(text, placement=None, **more):
    """The claims that do not hold."""
    return judge(text, placement, **more).broken


@pytest.mark.parametrize("builder", SCHEDULES.values(), ids=SCHEDULES)
def test_every_schedule_holds_every_claim_in_every_world(builder):
    for p, m, (lanes, capacity) in itertools.product(range(1, 5), range(1, 5), WORLDS):
        schedule = builder(p, m)
        programs = lower(schedule, lanes, range(1, schedule.num_stages))
        verdicts = verify(programs, schedule.placement, m, capacity=capacity, lanes=lanes)
        assert verdicts, verdicts


@pytest.mark.parametrize("placement", [(0, 1, 2), (0, 1, 0, 1), (0, 0, 1, 1), (0, 1, 1, 0), (1, 0), (2, 0, 1, 1)])
def test_an_evaluation_holds_every_claim_wherever_its_stages_lie(placement):
    for m, (lanes, capacity) in itertools.product(range(1, 5), WORLDS):
        programs = lower(forward_only(placement, m), lanes, ())
        verdicts = verify(programs, placement, m, capacity=capacity, lanes=lanes, is_training=False)
        assert verdicts, verdicts


def test_verdicts_are_read_as_they_are_printed():
    verdicts = judge(RIGHT)
    assert verdicts
    assert verdicts.broken == {}
    assert str(verdicts).splitlines()[:2] == ["complete: yes", "ordered: yes"]
    wrong = judge(RIGHT.replace("0F0,", ""))
    assert not wrong
    assert str(wrong).startswith("complete: no: 0F0 is missing")
    assert Verdict()
    assert not Verdict("because")


# -- complete ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("1F0,", "", "1F0 is missing"),
        (",0B0", "", "Stage 0 has no backward for microbatch 0: neither 0B0 nor 0I0 and 0W0"),
        (",0B0", ",0I0", "0W0 is missing, though 0I0 stands"),
        (",0B0", ",0W0", "0I0 is missing, though 0W0 stands"),
        (",0B0", ",0I0,0B0,0W0", "0B0 and 0I0 both stand"),
        (",0B0", ",0B0,0B0", "0B0 stands twice: at rank 0, instruction 3 and at rank 0, instruction 4"),
        ("0F0,", "0F0,0F0,", "0F0 stands twice"),
        (",1B0", ",1B0,0W0", "0W0 at rank 1, instruction 3 stands on the wrong rank: stage 0 is on rank 0"),
        (",0B0", ",0B0,0F1", "1F1 is missing|Stage 0 has no backward for microbatch 1"),
    ],
)
def test_what_is_missing_twice_or_astray_is_named(before, after, words):
    assert before in RIGHT
    assert re.search(words, broken(RIGHT.replace(before, after))["complete"])


def test_a_whole_microbatch_that_is_missing_is_seen_where_its_number_is_known():
    assert judge(RIGHT)
    assert "0F1 is missing" in broken(RIGHT, num_microbatches=2)["complete"]
    assert "of a microbatch that there is not" in broken(RIGHT, num_microbatches=0)["complete"]


def test_a_stage_that_there_is_not_is_named():
    programs = parse_program(RIGHT)
    programs[0].append(Action(5, "F", 0))
    assert "5F0 at rank 0, instruction 4 is of a stage that there is not" in verify(programs, (0, 1)).broken["complete"]


def test_an_evaluation_has_no_backwards():
    assert judge("0F0,0SEND_F0\n1RECV_F0,1F0", is_training=False)
    assert "0B0 at rank 0, instruction 3 is a backward" in broken(RIGHT, is_training=False)["complete"]


# -- ordered -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0B0,0F0", "0B0 at rank 0, instruction 0 needs 0F0, which stands after it, at rank 0, instruction 1"),
        ("0F0,0W0,0I0", "0W0 at rank 0, instruction 1 needs 0I0, which stands after it"),
        ("0F0,0W0", "0W0 at rank 0, instruction 1 needs 0I0, which rank 0 never has"),
        ("0F0,0B0,0W0", "0W0 at rank 0, instruction 2 needs 0I0, which rank 0 never has"),
        (RIGHT.replace("1RECV_F0,1F0", "1F0,1RECV_F0"), "1F0 at rank 1, instruction 0 needs 1RECV_F0, which stands"),
        (RIGHT.replace("0RECV_B0,0B0", "0B0,0RECV_B0"), "0B0 at rank 0, instruction 2 needs 0RECV_B0, which stands"),
        (RIGHT.replace("0F0,0SEND_F0", "0SEND_F0,0F0"), "0SEND_F0 at rank 0, instruction 0 needs 0F0, which stands"),
        (RIGHT.replace("1B0,1SEND_B0", "1SEND_B0,1B0"), "1SEND_B0 at rank 1, instruction 2 needs 1B0, which stands"),
        (RIGHT.replace(",1B0", ""), "1SEND_B0 at rank 1, instruction 2 needs 1B0 or 1I0, which rank 1 never has"),
    ],
)
def test_what_comes_before_what_it_needs_is_named_with_both_places(text, words):
    assert words in broken(text)["ordered"]


def test_stages_of_one_rank_need_each_others_actions():
    assert judge("0F0,1F0,1B0,0B0")
    assert "1F0 at rank 0, instruction 0 needs 0F0" in broken("1F0,0F0,1B0,0B0")["ordered"]
    assert "0B0 at rank 0, instruction 2 needs 1B0" in broken("0F0,1F0,0B0,1B0")["ordered"]
    assert judge("0F0,1F0,1I0,0B0,1W0")


def test_a_cotangent_that_nobody_needs_is_not_waited_for():
    text = "0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0"
    assert judge(text, cotangents=())
    assert "needs 0RECV_B0, which rank 0 never has" in broken(text)["ordered"]
    reason = broken(RIGHT, cotangents=())["matched"]
    assert reason == "0RECV_B0 at rank 0, instruction 2 is a cotangent that nobody below stage 1 needs."


# -- matched -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("1RECV_F0,", "", "0F0 is sent at rank 0, instruction 1 and never received by stage 1"),
        (",1SEND_B0", "", "1B0 is received at rank 0, instruction 2 and never sent by stage 1"),
        ("0SEND_F0", "0SEND_F0,0SEND_F0", "0SEND_F0 stands twice: at rank 0, instruction 1 and at rank 0, instruction"),
        ("1RECV_F0", "1RECV_F0,1RECV_F0", "1RECV_F0 stands twice"),
        (",1SEND_B0", ",1SEND_B0,0SEND_F0", "0SEND_F0 at rank 1, instruction 4 stands on the wrong rank: stage 0 is"),
    ],
)
def test_a_message_without_its_other_end_is_named(before, after, words):
    assert before in RIGHT
    assert words in broken(RIGHT.replace(before, after))["matched"]


def test_a_message_of_another_edge_is_named():
    programs = parse_program("0F0,1F0\n2F0")
    inside = [[*programs[0], Send(Message(0, "F", 0), 0)], programs[1]]
    assert "which are both on rank 0" in verify(inside, (0, 0, 1)).broken["matched"]
    astray = [[*programs[0], Send(Message(1, "F", 0), 7)], programs[1]]
    assert "goes to rank 7, but stage 2 is on rank 1" in verify(astray, (0, 0, 1)).broken["matched"]
    stranger = [programs[0], [Receive(Message(1, "F", 0), 1), *programs[1]]]
    assert "waits for rank 1, but stage 1 is on rank 0" in verify(stranger, (0, 0, 1)).broken["matched"]
    nowhere = [programs[0], [*programs[1], Send(Message(2, "F", 0), 0)]]
    assert "is of an edge that there is not" in verify(nowhere, (0, 0, 1)).broken["matched"]


# -- order-consistent --------------------------------------------------------------------------------------------------


def test_messages_that_would_be_swapped_silently_are_both_named():
    # Stages 0 and 2 on rank 0. It sends an activation of stage 0, then a cotangent of stage 2; rank 1 takes that first.
    text = """\
0F0,0SEND_F0,2RECV_F0,2F0,0F1,2B0,0SEND_F1,2SEND_B0
1RECV_F0,1F0,1SEND_F0,1RECV_B0,1B0,1RECV_F1,1F1
"""
    reason = broken(text)["order_consistent"]
    assert "Message 1 on the link from rank 0 to rank 1" in reason
    assert "sent as 0F1 (0SEND_F1 at rank 0, instruction 6)" in reason
    assert "received as 2B0 (1RECV_B0 at rank 1, instruction 3)" in reason
    assert "order_consistent" not in broken(text.replace("0SEND_F1,2SEND_B0", "2SEND_B0,0SEND_F1"))


def test_two_receives_of_one_link_that_change_places_are_found():
    text = "0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F1,1RECV_F0,1F0,1F1"
    reasons = broken(text, is_training=False)
    assert list(reasons) == ["order_consistent"]


# -- deadlock-free -----------------------------------------------------------------------------------------------------

# Stages 0 and 2 on rank 0, 1 and 3 on rank 1, in an evaluation. Each rank sends, then receives.
BOTH_SEND_FIRST = """\
0F0,0SEND_F0,0F1,0SEND_F1,2RECV_F0,2F0,2SEND_F0,2RECV_F1,2F1,2SEND_F1
1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,3RECV_F0,3F0,1SEND_F1,3RECV_F1,3F1
"""


def test_ranks_that_both_send_first_wait_in_a_cycle_without_room():
    assert judge(BOTH_SEND_FIRST, is_training=False, capacity=1)
    assert judge(BOTH_SEND_FIRST, is_training=False, capacity=None)
    assert judge(BOTH_SEND_FIRST, is_training=False, capacity=0, lanes="directional")
    reasons = broken(BOTH_SEND_FIRST, is_training=False, capacity=0)
    assert list(reasons) == ["deadlock_free"]
    assert reasons["deadlock_free"].splitlines() == [
        "No rank can go on, over links of capacity 0 and a single lane:",
        "  rank 0 stands at 0SEND_F1 (instruction 3) and waits for rank 1 to take it",
        "  rank 1 stands at 1SEND_F0 (instruction 2) and waits for rank 0 to take it",
        "They wait in a cycle: rank 0 -> rank 1 -> rank 0.",
    ]


def test_a_link_that_is_full_holds_its_sender_up():
    text = "0F0,0SEND_F0,0F1,0SEND_F1,0F2,0SEND_F2,2RECV_F0\n1RECV_F0,1F0,1SEND_F0,1SEND_F0,1SEND_F0,1RECV_F1,1RECV_F2"
    assert "waits for rank 1 to take it" in find_deadlock(parse_program(text, (0, 1, 0)), 0, "single")
    assert "waits for rank 0 to make room" in find_deadlock(parse_program(text, (0, 1, 0)), 1, "single")
    assert find_deadlock(parse_program(text, (0, 1, 0)), 2, "single") is None


def test_receives_that_wait_for_each_other_are_a_cycle_in_every_world():
    text = RIGHT.replace("0F0,0SEND_F0,0RECV_B0", "0RECV_B0,0F0,0SEND_F0")
    for lanes, capacity in WORLDS:
        reason = broken(text, lanes=lanes, capacity=capacity)["deadlock_free"]
        assert "rank 0 stands at 0RECV_B0 (instruction 0) and waits for 1B0 from rank 1" in reason
        assert "rank 1 stands at 1RECV_F0 (instruction 0) and waits for 0F0 from rank 0" in reason
        assert "rank 0 -> rank 1 -> rank 0" in reason


def test_a_wait_for_a_rank_at_its_end_is_told_from_a_cycle():
    reason = broken("0F0,0RECV_B0,0B0\n1F0")["deadlock_free"]
    assert reason.endswith("Rank 0 waits for rank 1, which has nothing more to do.")


def test_what_cannot_leave_holds_its_rank_up_at_its_end():
    text = "0F0,0SEND_F0,0F1,0SEND_F1\n1F0"
    reason = find_deadlock(parse_program(text), 0, "directional")
    assert "rank 0 stands at its end and waits for rank 1 to take 0F0, which is still in its queue" in reason
    assert "to take 0F1" in find_deadlock(parse_program(text), 1, "directional")
    assert find_deadlock(parse_program(text), 2, "directional") is None
    assert "stands at 0SEND_F1" in find_deadlock(parse_program(text), 1, "single")


def test_a_rank_that_sends_to_itself_or_to_nobody_waits_for_ever():
    itself = [[Send(Message(0, "F", 0), 0), Receive(Message(0, "F", 0), 0)]]
    assert "rank 0 -> rank 0" in find_deadlock(itself, 0, "single")
    assert "Rank 0 waits for rank 3" in find_deadlock([[Send(Message(0, "F", 0), 3)]], 0, "single")
    assert "Rank 0 waits for rank 3" in find_deadlock([[Receive(Message(3, "B", 0), 3)]], None, "directional")


def test_a_negative_capacity_is_refused():
    with pytest.raises(ValueError, match="-1"):
        find_deadlock([[]], -1, "single")


# -- memory ------------------------------------------------------------------------------------------------------------


def test_residuals_are_counted_as_the_formulas_say():
    for p, m in itertools.product(range(1, 6), range(1, 6)):
        for s in range(p):
            assert most_residuals(sequential(p, m).actions[s]) == 1
            assert most_residuals(gpipe(p, m).actions[s]) == m
            assert most_residuals(one_f_one_b(p, m).actions[s]) == min(p - s, m)


def test_the_weight_part_frees_what_the_forward_kept():
    [program] = parse_program("0F0,0F1,0I0,0I1,0W0,0W1")
    assert held_residuals(program) == [1, 2, 2, 2, 1, 0]


def test_a_rank_over_its_limit_is_named():
    programs = lower(one_f_one_b(3, 4), "single", {1, 2})
    assert verify(programs, range(3), residual_limit=3)
    assert verify(programs, range(3), residual_limit=[3, 2, 1])
    reason = verify(programs, range(3), residual_limit=[3, 1, 1]).broken["within_limit"]
    assert "makes it 2 residuals that rank 1 keeps, and 1 are allowed" in reason
    assert "1F1 at rank 1" in reason


def test_stages_of_one_rank_are_counted_together():
    assert "makes it 2 residuals that rank 0" in broken("0F0,1F0,1B0,0B0", residual_limit=1)["within_limit"]
    assert judge("0F0,1F0,1B0,0B0", residual_limit=2)


def test_a_buffer_in_use_is_not_filled_again():
    twice = RIGHT.replace("0SEND_F0", "0SEND_F0,0SEND_F0").replace("1RECV_F0", "1RECV_F0,1RECV_F0")
    reason = broken(twice)["filled_once"]
    assert reason == "1RECV_F0 at rank 1, instruction 1 fills a buffer that is in use since rank 1, instruction 0."
    later = RIGHT.replace("0SEND_F0", "0SEND_F0,0SEND_F0").replace("1F0", "1F0,1RECV_F0")
    assert list(broken(later)) == ["matched"]
