import csv
import itertools
import re
from io import StringIO
from itertools import accumulate

import pytest
from pictures import action, read
from tiny import batch, tiny

from pptrain import Pipeline
from pptrain.errors import ScheduleError
from pptrain.interleaved import interleaved
from pptrain.registry import SCHEDULES
from pptrain.schedule import Action, Schedule, gpipe, loop, one_f_one_b, sequential
from pptrain.simulate import Costs, Span, simulate, travel_time
from pptrain.v_shape import v_half, v_min, zb_v
from pptrain.zero_bubble import zb_h1, zb_h2
from transports import LoopbackWorld

SIZES = list(itertools.product(range(1, 9), [1, 2, 3, 5, 8, 16, 40]))

# Measured times in milliseconds and the bubbles that follow: Qi et al. 2023, Zero Bubble Pipeline Parallelism,
# https://arxiv.org/abs/2401.10241, tables 5 and 6. The interleaved cells were run with `chunks` stages a rank.
PUBLISHED = list(
    csv.DictReader(
        StringIO(
            """\
model,p,m,F,I,W,link,1f1b,zb-h1,zb-h2,interleaved,chunks
1.5B,8,24,18.522,18.086,9.337,0.601,0.2431,0.1585,0.1083,0.1055,3
1.5B,8,64,18.546,18.097,9.321,0.762,0.1240,0.0674,0.0444,0.0443,3
6.2B,8,32,29.802,29.428,19.530,0.577,0.1898,0.1045,0.0559,0.0628,4
6.2B,8,64,29.935,29.621,19.388,0.535,0.1091,0.0554,0.0294,0.0320,4
14.6B,16,48,11.347,11.248,8.132,0.377,0.2552,0.1397,0.0672,0.1104,3
14.6B,16,64,11.307,11.254,8.101,0.379,0.2082,0.1088,0.0516,0.0852,3
28.3B,32,96,10.419,10.207,7.715,0.408,0.2646,0.1421,0.0641,0.1493,2
28.3B,32,128,10.408,10.204,7.703,0.408,0.2168,0.1106,0.0490,0.1164,2
"""
        )
    )
)


def costs_of(row, chunks=1):
    return Costs({kind: float(row[kind]) / chunks for kind in "FIW"}, float(row["link"]))


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row['model']}-{row['m']}")
def test_bubbles_are_the_published_ones_to_four_decimals(row):
    p, m = int(row["p"]), int(row["m"])
    found = {b: simulate(b(p, m), costs_of(row)).bubble for b in (one_f_one_b, zb_h1, zb_h2)}
    assert [f"{bubble:.4f}" for bubble in found.values()] == [row["1f1b"], row["zb-h1"], row["zb-h2"]]


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row['model']}-{row['m']}")
def test_interleaved_bubbles_are_within_5_percent_of_the_published_ones(row):
    p, m, chunks = int(row["p"]), int(row["m"]), int(row["chunks"])
    bubble = simulate(interleaved(p, m, chunks), costs_of(row, chunks)).bubble
    assert bubble == pytest.approx(float(row["interleaved"]), rel=0.05)


def test_the_time_waited_is_that_of_the_closed_forms():
    for (p, m), (f, i, w) in itertools.product(SIZES, [(1, 1, 1), (2, 3, 2), (4, 4, 3)]):
        costs, work = Costs({"F": f, "I": i, "W": w}), m * (f + i + w)
        for builder in (gpipe, one_f_one_b):
            timing = simulate(builder(p, m), costs)
            assert timing.makespan == timing.longest_span == work + (p - 1) * (f + i + w)
            assert timing.bubble == pytest.approx((p - 1) / (m + p - 1))
        assert simulate(sequential(p, m), costs).makespan == p * work
    for p, m in SIZES:
        if m >= p:
            assert simulate(zb_h1(p, m)).longest_span == 3 * m + (p - 1)  # F + I - W
        if m >= 2 * p - 1:
            assert simulate(zb_h2(p, m)).longest_span == 3 * m  # F + I - 2W
            assert simulate(zb_v(p, m)).longest_span == 6 * m  # of two stages, each 1/2
        if m >= p:
            for builder in (v_half, v_min):
                assert 6 * m <= simulate(builder(p, m)).longest_span <= 6 * m + 6 * (p - 1)
        for v in (1, 2, 4):
            if m % p == 0:
                assert simulate(interleaved(p, m, v)).makespan == 3 * m * v + 3 * (p - 1)  # of stages, each 1/v


def test_actions_start_as_early_as_order_and_needs_allow():
    schedule = read(
        """
        F0 F1 .  .  B0
        .  F0 B0 F1
        """
    )
    found = simulate(schedule, Costs({"F": 1, "B": 3})).spans
    assert [(str(span.action), span.start, span.end) for span in found] == [
        ("0F0", 0, 1),
        ("0F1", 1, 2),
        ("1F0", 1, 2),
        ("1B0", 2, 5),
        ("0B0", 5, 8),
        ("1F1", 5, 6),
    ]
    assert found[0] == Span(Action(0, "F", 0), 0, 1)


def ends(timing):
    return {str(span.action): span.end for span in timing.spans}


def test_a_whole_backward_costs_its_two_parts_unless_it_has_a_cost():
    schedule = gpipe(1, 1)
    assert simulate(schedule, Costs({"F": 1, "I": 2, "W": 5})).makespan == 8
    assert simulate(schedule, Costs({"F": 1, "I": 2, "W": 5, "B": 6})).makespan == 7


def test_stages_may_have_costs_of_their_own():
    timing = simulate(gpipe(2, 1), Costs([{"F": 1, "B": 2}, {"F": 10, "B": 20}]))
    assert ends(timing) == {"0F0": 1, "1F0": 11, "1B0": 31, "0B0": 33}
    assert timing.bubble == pytest.approx((33 - 30) / 33)  # the busiest rank works 30 of them


def test_a_message_between_ranks_takes_the_link_s_time_and_one_within_a_rank_none():
    schedule = Schedule("", 1, (0, 0, 1), ((action("0F0"), action("1F0")), (action("2F0"),)))
    assert ends(simulate(schedule, Costs({"F": 1}, 5))) == {"0F0": 1, "1F0": 2, "2F0": 8}


def test_links_may_have_times_of_their_own():
    timing = simulate(gpipe(2, 1), Costs({"F": 1, "B": 1}, {(0, 1): 3, (1, 0): 4}))
    assert ends(timing) == {"0F0": 1, "1F0": 5, "1B0": 6, "0B0": 11}
    assert timing.link_use == {(0, 1): 3 / 11, (1, 0): 4 / 11}


def test_a_boundary_travels_for_latency_and_bandwidth():
    assert travel_time(58.7e6, 0.0005, 5e9) == pytest.approx(0.01224)


def test_residuals_live_from_the_start_of_a_forward_to_the_end_of_the_weight_part():
    timing = simulate(read("F0 F1 I0 W0 B1"), Costs({"F": 1, "I": 2, "W": 4}))
    assert timing.residuals == (((0, 1), (1, 2), (8, 1), (14, 0)),)
    assert timing.most_residuals == (2,)


def test_the_longest_span_leaves_out_what_a_rank_waits_at_its_beginning_and_end():
    timing = simulate(read("F0\n.  F0 B0"), Costs({"F": 5, "B": 9}))
    assert (timing.makespan, timing.longest_span) == (19, 14)


def test_nothing_takes_no_time():
    timing = simulate(Schedule("", 0, loop(2), ((), ())))
    assert (timing.makespan, timing.longest_span, timing.bubble, timing.most_residuals) == (0, 0, 0, (0, 0))


def test_an_action_that_waits_for_one_that_never_comes_is_refused_and_shown():
    with pytest.raises(ScheduleError) as caught:
        simulate(read("F0 B0\nB0 F0"))
    assert "rank 0 stands at 0B0 (action 1)" in str(caught.value)
    assert "rank 1 stands at 1B0 (action 0)" in str(caught.value)


# -- what is said on paper is what runs --------------------------------------------------------------------------------

_SECONDS = {"F": 3.0, "B": 5.0, "I": 3.0, "W": 2.0}


def _takes(position: str) -> float:
    """How long the instruction at a position takes: messages take no time of their rank's."""
    found = re.match(r"\d+([FBIW])\d+ ", position)
    return _SECONDS[found[1]] if found else 0.0


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_loopbacks_clock_is_the_simulators_action_by_action(name):
    world = LoopbackWorld(3, durations=_takes, latency_seconds=0.5)
    pipeline = Pipeline(tiny(6), 3, schedule=name, transport=world)
    pipeline.value_and_grad(*batch(rows=5), 5)
    timing = simulate(SCHEDULES[name](3, 5), Costs(_SECONDS, 0.5))
    ran = [span for rank in range(3) for span in pipeline.spans[rank]]
    assert sorted(ran, key=lambda span: str(span.action)) == sorted(timing.spans, key=lambda span: str(span.action))


@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_hold_as_many_residuals_as_the_schedule_says(name):
    pipeline = Pipeline(tiny(6), 3, schedule=name)
    pipeline.value_and_grad(*batch(rows=6), 6)
    schedule = SCHEDULES[name](3, 6)
    for rank, row in enumerate(schedule.actions):
        stages = schedule.stages(rank)
        for stage in stages:
            changes = [{"F": 1, "I": 0}.get(action.kind, -1) for action in row if action.stage == stage]
            assert pipeline.stage(stage).max_live_residuals == max(accumulate(changes))
        if len(stages) == 1:
            assert pipeline.stage(stages[0]).max_live_residuals == simulate(schedule).most_residuals[rank]
