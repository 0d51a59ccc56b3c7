"""Schedules as values: complete, runnable, as fast and as frugal as their formulas say."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import any_schedules, built, examples

from pptrain.auto import auto, most_held
from pptrain.errors import ConfigError, ScheduleError
from pptrain.notation import program_to_csv, read_schedule
from pptrain.registry import SCHEDULES, find_schedule
from pptrain.schedule import (
    Action,
    Builder,
    Placement,
    Schedule,
    forward_only,
    gpipe,
    loop,
    needs,
    one_f_one_b,
    sequential,
    vee,
)
from pptrain.simulate import Costs, simulate
from pptrain.v_shape import v_half, v_min, zb_v
from pptrain.zero_bubble import zb_h1, zb_h2

stages = st.integers(1, 8)
microbatches = st.integers(1, 16)
durations = st.fixed_dictionaries({kind: st.integers(1, 50) for kind in "FIW"})
times = st.integers(0, 50)


@st.composite
def costs_for(draw: st.DrawFn, schedule: Schedule) -> Costs:
    """Costs of all stages or of each, links of one time or each of its own."""
    each = draw(st.one_of(durations, st.lists(durations, min_size=schedule.num_stages, max_size=schedule.num_stages)))
    ranks = range(schedule.num_ranks)
    link = draw(st.one_of(times, st.fixed_dictionaries({(a, b): times for a in ranks for b in ranks if a != b})))
    return Costs(each, link)


@given(schedule=any_schedules(), p=stages, m=microbatches)
def test_every_stage_does_everything_once_in_an_order_that_can_be(schedule: str | Builder, p: int, m: int):
    of_p = built(schedule, p, m)
    assert (of_p.num_ranks, of_p.num_microbatches, set(of_p.placement)) == (p, m, set(range(p)))
    for rank, actions in enumerate(of_p.actions):
        assert {action.stage for action in actions} == set(of_p.stages(rank))
        assert max(Counter(actions).values()) == 1
        place = {(a.stage, a.kind, a.microbatch): i for i, a in enumerate(actions)}
        for s in of_p.stages(rank):
            for j in range(m):
                if (s, "B", j) in place:
                    assert place[s, "F", j] < place[s, "B", j]
                    assert not {(s, "I", j), (s, "W", j)} & set(place)
                else:
                    assert place[s, "F", j] < place[s, "I", j] < place[s, "W", j]
        assert {j for _, _, j in place} == set(range(m))


@given(schedule=any_schedules(), p=stages, m=microbatches, data=st.data())
def test_no_action_starts_before_what_it_needs_and_none_later_than_it_must(
    schedule: str | Builder, p: int, m: int, data: st.DataObject
):
    of_p = built(schedule, p, m)
    costs = data.draw(costs_for(of_p))
    timing = simulate(of_p, costs)
    ran, ends = timing.spans, {span.action: span.end for span in timing.spans}
    assert Counter(ends) == Counter({a: ends[a] for actions in of_p.actions for a in actions})
    assert [span.start for span in ran] == sorted(span.start for span in ran)
    for rank, actions in enumerate(of_p.actions):
        own = [span for span in ran if of_p.placement[span.action.stage] == rank]
        assert tuple(span.action for span in own) == actions
        for before, span in pairwise([None, *own]):
            assert span is not None
            assert span.end - span.start == costs.of(span.action)
            arrived = [
                ends[a] + costs.between(of_p.placement[a.stage], rank)
                for a in needs(span.action, of_p.num_stages, ends)
            ]
            assert span.start == max([before.end if before else 0, *arrived])


@given(schedule=any_schedules(), p=stages, m=microbatches, data=st.data())
def test_what_a_timing_says_is_what_its_spans_say(schedule: str | Builder, p: int, m: int, data: st.DataObject):
    of_p = built(schedule, p, m)
    timing = simulate(of_p, data.draw(costs_for(of_p)))
    assert timing.makespan == max(span.end for span in timing.spans)
    assert timing.longest_span <= timing.makespan
    assert 0 <= timing.bubble < 1
    for changes, most in zip(timing.residuals, timing.most_residuals, strict=True):
        assert changes[-1][1] == 0
        assert max(live for _, live in changes) == most
        assert min(live for _, live in changes) == 0
    crossing = {tuple(pair) for pair in pairwise(of_p.placement) if pair[0] != pair[1]}
    assert set(timing.link_use) == crossing | {(b, a) for a, b in crossing}


@given(schedule=any_schedules(), p=stages, m=microbatches, data=st.data())
def test_nothing_is_over_sooner_where_anything_costs_more(schedule: str | Builder, p: int, m: int, data: st.DataObject):
    of_p = built(schedule, p, m)
    costs = data.draw(costs_for(of_p))
    each = costs.durations if isinstance(costs.durations, list) else [costs.durations] * of_p.num_stages
    slower = [dict(one) for one in each]
    slower[data.draw(st.integers(0, len(each) - 1))][data.draw(st.sampled_from("FIW"))] += data.draw(times)
    links = {(a, b): costs.between(a, b) for a in range(p) for b in range(p) if a != b}
    if links:
        links[data.draw(st.sampled_from(sorted(links)))] += data.draw(times)
    before, after = simulate(of_p, costs), simulate(of_p, Costs(slower, links))
    ends = {span.action: span.end for span in after.spans}
    assert all(span.end <= ends[span.action] for span in before.spans)
    assert before.makespan <= after.makespan


@given(schedule=st.sampled_from(sorted(SCHEDULES)), p=stages, m=microbatches)
def test_named_schedules_go_forward_and_backward_in_ascending_order(schedule: str, p: int, m: int):
    for actions in built(schedule, p, m).actions:
        for kind in "FBIW":
            for stage in {action.stage for action in actions}:
                numbers = [a.microbatch for a in actions if a.kind == kind and a.stage == stage]
                assert numbers in ([], list(range(m)))


@given(p=stages, m=microbatches)
def test_live_residuals_are_those_of_the_formulas(p: int, m: int):
    assert simulate(sequential(p, m)).most_residuals == (1,) * p
    assert simulate(gpipe(p, m)).most_residuals == (m,) * p
    assert simulate(one_f_one_b(p, m)).most_residuals == tuple(min(p - s, m) for s in range(p))
    assert simulate(zb_h1(p, m)).most_residuals == (min(p, m),) * p
    assert simulate(zb_h2(p, m)).most_residuals == (min(2 * p - 1, m),) * p


@given(p=stages, m=microbatches, costs=durations)
def test_gpipe_and_1f1b_have_a_bubble_of_p_minus_1_forwards_and_backwards(p: int, m: int, costs: dict[str, int]):
    for builder in (gpipe, one_f_one_b):
        assert simulate(builder(p, m), Costs(costs)).makespan == (m + p - 1) * sum(costs.values())


@given(p=stages, m=microbatches, costs=durations)
def test_sequential_is_as_slow_as_one_device(p: int, m: int, costs: dict[str, int]):
    assert simulate(sequential(p, m), Costs(costs)).makespan == p * m * sum(costs.values())


@examples(0.3)
@given(
    placement=st.sampled_from([loop(2), loop(3), loop(4), vee(2), vee(3), loop(2, 3)]),
    m=st.integers(1, 8),
    share=st.sampled_from([0.0, 0.4, 1.0]),
    data=st.data(),
)
def test_auto_keeps_the_limits_and_is_no_longer_than_a_named_schedule_that_does(
    placement: Placement, m: int, share: float, data: st.DataObject
):
    p = max(placement) + 1
    each = len(placement) // p
    empty = Schedule("", m, placement, ((),) * p)
    costs = data.draw(costs_for(empty))
    limits = data.draw(st.lists(st.integers(each, 3 * len(placement)), min_size=p, max_size=p))
    found = auto(placement, m, costs, limits, share)
    assert found == auto(placement, m, costs, limits, share)
    done = Counter(a for row in found.actions for a in row)
    kinds = {action.kind for action in done}
    assert kinds in ({"F", "B"}, {"F", "I", "W"})
    assert done == Counter(Action(s, kind, j) for s in range(len(placement)) for j in range(m) for kind in kinds)
    assert all(held <= limit + 1e-6 for held, limit in zip(most_held(found, share), limits, strict=True))
    timing = simulate(found, costs)
    for builder in SCHEDULES.values():
        named = builder(p, m)
        if named.placement == placement and all(a <= b for a, b in zip(most_held(named, share), limits, strict=True)):
            assert timing.longest_span <= simulate(named, costs).longest_span


@given(schedule=any_schedules(), p=stages, m=microbatches)
def test_a_schedule_is_the_same_after_writing_and_reading(schedule: str | Builder, p: int, m: int):
    of_p = built(schedule, p, m)
    assert read_schedule(program_to_csv(of_p.actions), of_p.name) == of_p


@given(p=stages, m=microbatches)
def test_schedules_over_a_v_hold_what_they_promise(p: int, m: int):
    assert max(simulate(zb_v(p, m)).most_residuals) <= 2 * p
    assert max(simulate(v_half(p, m)).most_residuals) <= p + (1 if p % 2 else 3)
    assert max(simulate(v_min(p, m)).most_residuals) <= 2 + 2 * ceil((p - 1) / 3)


@given(p=stages, m=microbatches, costs=durations)
def test_zb_h1_waits_no_longer_than_1f1b(p: int, m: int, costs: dict[str, int]):
    assert simulate(zb_h1(p, m), Costs(costs)).longest_span <= simulate(one_f_one_b(p, m), Costs(costs)).longest_span


@given(p=stages, m=microbatches, costs=durations, v=st.integers(1, 3))
def test_evaluation_has_forwards_only_and_a_bubble_of_p_minus_1(p: int, m: int, costs: dict[str, int], v: int):
    schedule = forward_only(loop(p), m)
    assert schedule.actions == tuple(tuple(Action(s, "F", j) for j in range(m)) for s in range(p))
    assert simulate(schedule, Costs(costs)).makespan == (m + p - 1) * costs["F"]
    looped = simulate(forward_only(loop(p, v), m))
    assert len(looped.spans) == p * v * m


@given(schedule=any_schedules(), p=st.integers(2, 8), m=microbatches, data=st.data())
def test_a_schedule_without_one_needed_action_is_found_stuck(
    schedule: str | Builder, p: int, m: int, data: st.DataObject
):
    whole = built(schedule, p, m)
    # A forward is needed by its own backward, wherever it stands.
    lost = Action(data.draw(st.integers(0, whole.num_stages - 1)), "F", data.draw(st.integers(0, m - 1)))
    rows = tuple(tuple(action for action in row if action != lost) for row in whole.actions)
    with pytest.raises(ScheduleError, match=rf"rank {whole.placement[lost.stage]} stands at \d+[FBI]\d+"):
        simulate(replace(whole, actions=rows))


@given(name=st.text(max_size=12).filter(lambda name: name not in SCHEDULES))
def test_an_unknown_schedule_is_refused_with_the_names_there_are(name: str):
    with pytest.raises(ConfigError) as caught:
        find_schedule(name)
    assert repr(name) in str(caught.value)
    assert all(known in str(caught.value) for known in SCHEDULES)
