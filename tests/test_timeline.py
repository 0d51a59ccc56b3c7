import pytest
from pictures import read

from pptrain.interleaved import interleaved
from pptrain.schedule import Action, Schedule, loop, one_f_one_b
from pptrain.simulate import Span
from pptrain.timeline import bubble_share, draw


def test_a_drawing_has_one_row_a_stage_one_column_a_slot_and_bubbles_as_dots():
    assert draw(one_f_one_b(2, 2)) == (
        "stage 0   F0 F1 .  B0 .  B1\n"  # the second backward waits for the stage above
        "stage 1   .  F0 B0 F1 B1 ."
    )


def test_columns_are_as_wide_as_the_widest_action():
    last = draw(one_f_one_b(1, 11)).splitlines()[0]
    assert last.startswith("stage 0   F0  B0  F1  B1  ")
    assert last.endswith("F10 B10")


def test_split_backwards_are_drawn():
    picture = "stage 0   F0 .  .  I0 W0\nstage 1   .  F0 I0 W0 ."
    assert draw(read(picture)) == picture


def test_a_rank_with_two_stages_is_drawn_in_one_row_with_the_stage_before_each_action():
    assert draw(interleaved(1, 1)) == "rank 0   0F0 1F0 1B0 0B0"


def test_the_bubble_share_is_the_time_waited_over_all_ranks():
    ran = {
        0: [Span(Action(0, "F", 0), 10, 11), Span(Action(0, "B", 0), 13, 15)],
        1: [Span(Action(1, "F", 0), 11, 12), Span(Action(1, "B", 0), 12, 13)],
    }
    assert bubble_share(ran) == pytest.approx(1 - 5 / 10)


def test_nothing_that_ran_has_no_bubble():
    assert bubble_share({0: [], 1: []}) == 0.0
    assert draw(Schedule("", 0, loop(2), ((), ()))) == "stage 0\nstage 1"
