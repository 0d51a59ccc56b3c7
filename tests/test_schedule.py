import itertools
from math import ceil

import pytest
from pictures import action, read, rows

from pptrain.errors import ConfigError, ScheduleError
from pptrain.interleaved import interleaved
from pptrain.registry import SCHEDULES, count_stages_per_rank, find_schedule
from pptrain.schedule import (
    Action,
    forward_only,
    gpipe,
    loop,
    needs,
    one_f_one_b,
    sequential,
    vee,
)
from pptrain.simulate import simulate
from pptrain.timeline import draw
from pptrain.v_shape import v_half, v_min, zb_v
from pptrain.zero_bubble import zb_h1, zb_h2

SIZES = list(itertools.product(range(1, 17), [1, 2, 3, 5, 8, 13, 16, 17, 31, 32, 50]))


def assert_draws_as(schedule, picture):
    assert schedule.actions == read(picture, schedule.placement).actions
    assert rows(draw(schedule)) == rows(picture)


def test_an_action_prints_as_stage_kind_microbatch():
    assert str(Action(2, "F", 10)) == "2F10"


@pytest.mark.parametrize(
    ("builder", "p", "m"),
    [
        (sequential, 3, 2),
        (gpipe, 3, 3),
        (one_f_one_b, 4, 4),
        (interleaved, 2, 4),
        (zb_h1, 3, 4),
        (zb_h2, 3, 6),
        (zb_v, 2, 4),
        (v_half, 3, 3),
        (v_min, 3, 2),
    ],
)
def test_the_picture_in_a_docstring_is_what_the_schedule_returns(builder, p, m):
    assert_draws_as(builder(p, m), builder.__doc__)


def test_the_picture_of_evaluation_is_what_it_returns():
    assert_draws_as(forward_only(loop(2), 3), forward_only.__doc__)


def test_evaluation_passes_through_a_rank_as_often_as_it_has_stages():
    assert_draws_as(
        forward_only(loop(2, 2), 3),
        """
        0F0 0F1 2F0 0F2 2F1 2F2
        .   1F0 1F1 3F0 1F2 3F1 3F2
        """,
    )
    assert_draws_as(
        forward_only(vee(2), 2),
        """
        0F0 0F1 .   3F0 .   3F1
        .   1F0 2F0 1F1 2F1
        """,
    )


def test_sequential_ends_a_microbatch_before_the_next_begins():
    assert_draws_as(
        sequential(2, 3),
        """
        F0 .  .  B0 F1 .  .  B1 F2 .  .  B2
        .  F0 B0 .  .  F1 B1 .  .  F2 B2
        """,
    )


def test_gpipe_with_more_stages_than_microbatches():
    assert_draws_as(
        gpipe(4, 2),
        """
        F0 F1 .  .  .  .  .  .  B0 B1
        .  F0 F1 .  .  .  .  B0 B1
        .  .  F0 F1 .  .  B0 B1
        .  .  .  F0 F1 B0 B1
        """,
    )


def test_1f1b_with_more_microbatches_than_stages():
    assert_draws_as(
        one_f_one_b(2, 5),
        """
        F0 F1 .  B0 F2 B1 F3 B2 F4 B3 .  B4
        .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4
        """,
    )


def test_1f1b_with_fewer_microbatches_than_stages():
    assert_draws_as(
        one_f_one_b(4, 2),
        """
        F0 F1 .  .  .  .  .  B0 .  B1
        .  F0 F1 .  .  .  B0 .  B1
        .  .  F0 F1 .  B0 .  B1
        .  .  .  F0 B0 F1 B1
        """,
    )


def test_interleaved_with_a_number_of_microbatches_that_is_no_multiple_of_the_ranks():
    assert_draws_as(
        interleaved(2, 3),
        """
        0F0 0F1 2F0 2F1 0F2 2B0 .   2B1 2F2 0B0 0B1 .   2B2 .   0B2
        .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1B1 3F2 3B2 .   1B2
        """,
    )


def test_interleaved_with_one_microbatch_goes_down_and_back_up():
    assert_draws_as(
        interleaved(2, 1, 2),
        """
        0F0 .   2F0 .   .   2B0 .   0B0
        .   1F0 .   3F0 3B0 .   1B0
        """,
    )


def test_zb_v_with_fewer_microbatches_than_it_is_made_for():
    assert_draws_as(
        zb_v(2, 1),
        """
        0F0 .   .   3F0 3I0 3W0 .   .   0I0 0W0
        .   1F0 2F0 .   .   2I0 2W0 1I0 1W0
        """,
    )


def test_zb_h1_with_fewer_microbatches_than_stages():
    assert_draws_as(
        zb_h1(3, 2),
        """
        F0 F1 .  .  .  I0 W0 I1 W1
        .  F0 F1 .  I0 .  I1 W0 W1
        .  .  F0 I0 F1 I1 W0 W1
        """,
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_rank_does_each_microbatch_once_whatever_the_schedule(name):
    for m in (1, 2, 5):
        schedule = SCHEDULES[name](1, m)
        [actions] = schedule.actions
        assert len(set(actions)) == len(actions)
        assert sum(action.kind == "F" for action in actions) == m * schedule.num_stages


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_size_has_every_action_once_in_an_order_that_can_be_run(name):
    for p, m in SIZES:
        schedule = SCHEDULES[name](p, m)
        stages, actions = range(schedule.num_stages), [a for row in schedule.actions for a in row]
        kinds = {action.kind for action in actions}
        assert kinds in ({"F", "B"}, {"F", "I", "W"})
        assert len(actions) == len(set(actions))
        assert set(actions) == {Action(s, kind, j) for s in stages for kind in kinds for j in range(m)}
        assert all(schedule.placement[a.stage] == rank for rank, row in enumerate(schedule.actions) for a in row)
        simulate(schedule)


@pytest.mark.parametrize("builder", SCHEDULES.values())
def test_a_size_below_1_is_refused_with_the_rule(builder):
    for p, m, wrong in [(0, 1, "0 ranks"), (1, 0, "0 microbatches"), (-1, 4, "-1 ranks")]:
        with pytest.raises(ScheduleError, match=rf"was asked for {wrong}\. Expected at least 1"):
            builder(p, m)
    with pytest.raises(ScheduleError, match=r"interleaved was asked for 0 stages a rank\. Expected at least 1"):
        interleaved(2, 2, 0)


def test_residuals_are_those_of_the_formulas():
    for p, m in itertools.product(range(1, 7), range(1, 15)):
        assert simulate(sequential(p, m)).most_residuals == (1,) * p
        assert simulate(gpipe(p, m)).most_residuals == (m,) * p
        assert simulate(one_f_one_b(p, m)).most_residuals == tuple(min(p - s, m) for s in range(p))
        assert max(simulate(zb_h1(p, m)).most_residuals) == min(p, m)
        assert max(simulate(zb_h2(p, m)).most_residuals) == min(2 * p - 1, m)
        assert max(simulate(zb_v(p, m)).most_residuals) <= 2 * p
        assert max(simulate(v_half(p, m)).most_residuals) <= p + (1 if p % 2 else 3)
        assert max(simulate(v_min(p, m)).most_residuals) <= 2 + 2 * ceil((p - 1) / 3)
        for v in (2, 3) if m % p == 0 else ():
            held = [min(2 * (p - 1 - r) + (v - 1) * p + 1, m * v) for r in range(p)]
            assert simulate(interleaved(p, m, v)).most_residuals == tuple(held)


@pytest.mark.parametrize(
    ("text", "done", "expected"),
    [
        ("0F1", (), ()),
        ("2F1", (), ("1F1",)),
        ("2B1", (), ("2F1",)),
        ("0B1", (), ("0F1", "1B1")),
        ("0I1", (), ("0F1", "1B1")),
        ("0B1", ("1I1",), ("0F1", "1I1")),
        ("0W1", (), ("0I1",)),
    ],
)
def test_what_an_action_needs_on_three_stages(text, done, expected):
    assert needs(action(text), 3, [action(a) for a in done]) == [action(a) for a in expected]


def test_stages_are_numbered_over_the_whole_model_and_lie_in_a_loop_or_a_v():
    assert interleaved(3, 1, 2).placement == loop(3, 2) == (0, 1, 2, 0, 1, 2)
    assert vee(3) == (0, 1, 2, 2, 1, 0)
    assert interleaved(3, 1, 2).stages(1) == (1, 4)


def test_schedules_are_found_by_name():
    assert find_schedule("1f1b") is one_f_one_b
    assert find_schedule("gpipe") is gpipe
    assert find_schedule("sequential") is sequential


def test_the_number_of_stages_a_rank_is_the_schedule_s_own_or_for_interleaved_any():
    assert find_schedule("1f1b", 1) is one_f_one_b
    assert count_stages_per_rank(find_schedule("interleaved")) == 2
    assert find_schedule("interleaved", 3)(2, 4) == interleaved(2, 4, 3)
    with pytest.raises(ConfigError, match=r"1f1b was asked for with 3 stages a rank\. Expected 1\."):
        find_schedule("1f1b", 3)


@pytest.mark.parametrize(("name", "near"), [("gpip", "gpipe"), ("1fb1", "1f1b"), ("sequental", "sequential")])
def test_an_unknown_schedule_names_the_nearest_and_all(name, near):
    with pytest.raises(ConfigError, match=rf"Unknown schedule '{name}'.*sequential, gpipe, 1f1b.*Did you mean {near}"):
        find_schedule(name)
