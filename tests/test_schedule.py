import itertools

import pytest
from pictures import read, rows

from pptrain.errors import ConfigError, ScheduleError
from pptrain.schedule import (
    SCHEDULES,
    Action,
    Span,
    find_schedule,
    forward_only,
    gpipe,
    needs,
    one_f_one_b,
    sequential,
    spans,
    unroll,
)
from pptrain.timeline import draw

SIZES = list(itertools.product(range(1, 7), range(1, 9)))


def actions_of(schedule, p, m):
    return list(unroll(schedule, p, m).values())


def assert_draws_as(schedule, p, m, picture):
    lists = actions_of(schedule, p, m)
    assert lists == read(picture)
    assert rows(draw(lists, p)) == rows(picture)


def test_an_action_prints_as_stage_kind_microbatch():
    assert str(Action(2, "F", 10)) == "2F10"


@pytest.mark.parametrize(
    ("schedule", "p", "m"), [(sequential, 3, 2), (gpipe, 3, 3), (one_f_one_b, 4, 4), (forward_only, 2, 3)]
)
def test_the_picture_in_a_docstring_is_what_the_schedule_returns(schedule, p, m):
    assert_draws_as(schedule, p, m, schedule.__doc__)


def test_sequential_ends_a_microbatch_before_the_next_begins():
    assert_draws_as(
        sequential,
        2,
        3,
        """
        F0 .  .  B0 F1 .  .  B1 F2 .  .  B2
        .  F0 B0 .  .  F1 B1 .  .  F2 B2
        """,
    )


def test_gpipe_with_more_stages_than_microbatches():
    assert_draws_as(
        gpipe,
        4,
        2,
        """
        F0 F1 .  .  .  .  .  .  B0 B1
        .  F0 F1 .  .  .  .  B0 B1
        .  .  F0 F1 .  .  B0 B1
        .  .  .  F0 F1 B0 B1
        """,
    )


def test_1f1b_with_more_microbatches_than_stages():
    assert_draws_as(
        one_f_one_b,
        2,
        5,
        """
        F0 F1 .  B0 F2 B1 F3 B2 F4 B3 .  B4
        .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4
        """,
    )


def test_1f1b_with_fewer_microbatches_than_stages():
    assert_draws_as(
        one_f_one_b,
        4,
        2,
        """
        F0 F1 .  .  .  .  .  B0 .  B1
        .  F0 F1 .  .  .  B0 .  B1
        .  .  F0 F1 .  B0 .  B1
        .  .  .  F0 B0 F1 B1
        """,
    )


@pytest.mark.parametrize("schedule", SCHEDULES.values())
def test_one_stage_takes_each_microbatch_forward_and_back(schedule):
    [actions] = actions_of(schedule, 1, 3)
    expected = "F0 F1 F2 B0 B1 B2" if schedule is gpipe else "F0 B0 F1 B1 F2 B2"
    assert [actions] == read(expected)


@pytest.mark.parametrize("schedule", SCHEDULES.values())
def test_every_stage_runs_each_microbatch_once_forward_then_backward_in_ascending_order(schedule):
    for p, m in SIZES:
        for stage, actions in unroll(schedule, p, m).items():
            assert [a.microbatch for a in actions if a.kind == "F"] == list(range(m))
            assert [a.microbatch for a in actions if a.kind == "B"] == list(range(m))
            assert len(actions) == 2 * m
            assert all(a.stage == stage for a in actions)
            assert all(actions.index(Action(stage, "F", j)) < actions.index(Action(stage, "B", j)) for j in range(m))


def most_live(actions):
    live = itertools.accumulate({"F": 1, "B": -1}[action.kind] for action in actions)
    return max(live)


def test_residuals_are_those_of_the_formulas():
    for p, m in SIZES:
        for stage in range(p):
            assert most_live(sequential(stage, p, m)) == 1
            assert most_live(gpipe(stage, p, m)) == m
            assert most_live(one_f_one_b(stage, p, m)) == min(p - stage, m)


def test_gpipe_and_1f1b_wait_as_long_as_published():
    for p, m in SIZES:
        work = m * (1 + 2)
        for schedule in (gpipe, one_f_one_b):
            assert max(span.end for span in spans(actions_of(schedule, p, m), p)) == work + (p - 1) * (1 + 2)
        assert max(span.end for span in spans(actions_of(sequential, p, m), p)) == p * work


@pytest.mark.parametrize(
    ("action", "done", "expected"),
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
def test_what_an_action_needs_on_three_stages(action, done, expected):
    def parsed(text):
        return Action(int(text[0]), text[1], int(text[2]))

    assert needs(parsed(action), 3, [parsed(a) for a in done]) == [parsed(a) for a in expected]


def test_spans_start_as_early_as_order_and_needs_allow():
    lists = read(
        """
        F0 F1 .  .  B0
        .  F0 B0 F1
        """
    )
    found = spans(lists, 2, {"F": 1, "B": 3, "I": 1, "W": 1})
    assert [(str(span.action), span.start, span.end) for span in found] == [
        ("0F0", 0, 1),
        ("0F1", 1, 2),
        ("1F0", 1, 2),
        ("1B0", 2, 5),
        ("0B0", 5, 8),
        ("1F1", 5, 6),
    ]
    assert found[0] == Span(Action(0, "F", 0), 0, 1)


def test_an_action_that_waits_for_one_that_never_comes_is_refused_and_shown():
    lists = [[Action(0, "F", 0), Action(0, "B", 0)], [Action(1, "B", 0), Action(1, "F", 0)]]
    with pytest.raises(ScheduleError) as caught:
        spans(lists, 2)
    assert "rank 0 stands at 0B0 (action 1)" in str(caught.value)
    assert "rank 1 stands at 1B0 (action 0)" in str(caught.value)


def test_schedules_are_found_by_name():
    assert find_schedule("1f1b") is one_f_one_b
    assert find_schedule("gpipe") is gpipe
    assert find_schedule("sequential") is sequential


@pytest.mark.parametrize(("name", "near"), [("gpip", "gpipe"), ("1fb1", "1f1b"), ("sequental", "sequential")])
def test_an_unknown_schedule_names_the_nearest_and_all(name, near):
    with pytest.raises(ConfigError, match=rf"Unknown schedule '{name}'.*sequential, gpipe, 1f1b.*Did you mean {near}"):
        find_schedule(name)
