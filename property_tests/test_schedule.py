"""Schedules as lists: complete, runnable, as fast and as frugal as their formulas say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import any_schedules, unrolled

from pptrain.errors import ConfigError, ScheduleError
from pptrain.schedule import (
    SCHEDULES,
    Action,
    Span,
    StageSchedule,
    find_schedule,
    forward_only,
    gpipe,
    needs,
    one_f_one_b,
    sequential,
    spans,
)

stages = st.integers(1, 8)
microbatches = st.integers(1, 16)
costs = st.fixed_dictionaries({kind: st.integers(1, 50) for kind in "FBIW"})


def most_residuals(actions: Sequence[Action]) -> int:
    """The most microbatches between the end of their forward and the end of their backward."""
    live, most = 0, 0
    for action in actions:
        live += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
        most = max(most, live)
    return most


def makespan(ran: Sequence[Span]) -> float:
    """When the last action ends."""
    return max(span.end for span in ran)


@given(schedule=any_schedules(), p=stages, m=microbatches)
def test_every_stage_does_everything_once_in_an_order_that_can_be(schedule: str | StageSchedule, p: int, m: int):
    for stage, actions in unrolled(schedule, p, m).items():
        assert {action.stage for action in actions} == {stage}
        assert max(Counter(actions).values()) == 1
        place = {(action.kind, action.microbatch): i for i, action in enumerate(actions)}
        for j in range(m):
            if ("B", j) in place:
                assert place["F", j] < place["B", j]
                assert not {("I", j), ("W", j)} & set(place)
            else:
                assert place["F", j] < place["I", j] < place["W", j]
        assert {j for _, j in place} == set(range(m))


@given(schedule=any_schedules(), p=stages, m=microbatches, costs=costs)
def test_no_action_starts_before_what_it_needs(schedule: str | StageSchedule, p: int, m: int, costs: dict[str, int]):
    lists = list(unrolled(schedule, p, m).values())
    ran = spans(lists, p, costs)
    ends = {span.action: span.end for span in ran}
    assert Counter(ends) == Counter({a: ends[a] for actions in lists for a in actions})
    assert [span.start for span in ran] == sorted(span.start for span in ran)
    for span in ran:
        assert span.end - span.start == costs[span.action.kind]
        assert all(ends[before] <= span.start for before in needs(span.action, p, ends))
    for actions in lists:
        own = [span for span in ran if span.action.stage == actions[0].stage]
        assert [span.action for span in own] == actions
        assert all(a.end <= b.start for a, b in pairwise(own))


@given(schedule=st.sampled_from(sorted(SCHEDULES)), p=stages, m=microbatches)
def test_named_schedules_go_forward_and_backward_in_ascending_order(schedule: str, p: int, m: int):
    for stage, actions in unrolled(schedule, p, m).items():
        for kind in "FB":
            assert [a for a in actions if a.kind == kind] == [Action(stage, kind, j) for j in range(m)]


@given(p=stages, m=microbatches)
def test_live_residuals_are_one_m_and_at_most_p_minus_s(p: int, m: int):
    for s in range(p):
        assert most_residuals(sequential(s, p, m)) == 1
        assert most_residuals(gpipe(s, p, m)) == m
        assert most_residuals(one_f_one_b(s, p, m)) == min(p - s, m)


@given(p=stages, m=microbatches, costs=costs)
def test_gpipe_and_1f1b_have_a_bubble_of_p_minus_1_forwards_and_backwards(p: int, m: int, costs: dict[str, int]):
    one = costs["F"] + costs["B"]
    for schedule in (gpipe, one_f_one_b):
        ran = spans([schedule(s, p, m) for s in range(p)], p, costs)
        assert makespan(ran) == (m + p - 1) * one


@given(p=stages, m=microbatches, costs=costs)
def test_sequential_is_as_slow_as_one_device(p: int, m: int, costs: dict[str, int]):
    ran = spans([sequential(s, p, m) for s in range(p)], p, costs)
    assert makespan(ran) == p * m * (costs["F"] + costs["B"])


@given(p=stages, m=microbatches, costs=costs)
def test_evaluation_has_forwards_only_and_a_bubble_of_p_minus_1(p: int, m: int, costs: dict[str, int]):
    lists = [forward_only(s, p, m) for s in range(p)]
    assert lists == [[Action(s, "F", j) for j in range(m)] for s in range(p)]
    assert makespan(spans(lists, p, costs)) == (m + p - 1) * costs["F"]


@given(schedule=any_schedules(), p=st.integers(2, 8), m=microbatches, data=st.data())
def test_a_schedule_without_one_needed_action_is_found_stuck(
    schedule: str | StageSchedule, p: int, m: int, data: st.DataObject
):
    lists = list(unrolled(schedule, p, m).values())
    # A forward is needed by its own backward, wherever it stands.
    stage, j = data.draw(st.integers(0, p - 1)), data.draw(st.integers(0, m - 1))
    lists[stage] = [action for action in lists[stage] if action != Action(stage, "F", j)]
    with pytest.raises(ScheduleError, match=rf"rank {stage} stands at {stage}[FBI]\d+"):
        spans(lists, p)


@given(name=st.text(max_size=12).filter(lambda name: name not in SCHEDULES))
def test_an_unknown_schedule_is_refused_with_the_names_there_are(name: str):
    with pytest.raises(ConfigError) as caught:
        find_schedule(name)
    assert repr(name) in str(caught.value)
    assert all(known in str(caught.value) for known in SCHEDULES)
