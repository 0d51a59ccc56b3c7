import time

import pytest

from pptrain.auto import auto, most_held
from pptrain.errors import ScheduleError
from pptrain.schedule import loop, one_f_one_b, vee
from pptrain.simulate import Costs, simulate
from pptrain.v_shape import zb_v
from pptrain.zero_bubble import zb_h1

# The costs of `test_simulate.PUBLISHED`, with the published bubbles of the automatic schedule at the memory of P and of
# 2P microbatches, and of the models their heads and hidden size at 1,024 tokens (tables 3 and 5 of the same paper).
PUBLISHED = [
    # p, m, F, I, W, link, at P, at 2P, heads, hidden
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.1585, 0.0433, 24, 2304),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.0674, 0.0026, 24, 2304),
    (8, 32, 29.802, 29.428, 19.530, 0.577, 0.1045, 0.0022, 32, 4096),
    (8, 64, 29.935, 29.621, 19.388, 0.535, 0.0554, 0.0010, 32, 4096),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.1397, 0.0066, 40, 5120),
]


@pytest.mark.parametrize(("p", "m", "f", "i", "w", "link", "at_p", "at_2p", "heads", "hidden"), PUBLISHED)
def test_bubbles_are_at_most_half_a_point_above_the_published_ones(p, m, f, i, w, link, at_p, at_2p, heads, hidden):
    costs, share = Costs({"F": f, "I": i, "W": w}, link), 32 / (34 + 5 * heads * 1024 / hidden)
    for limit, published in ((p, at_p), (2 * p, at_2p)):
        started = time.process_time()
        schedule = auto(loop(p), m, costs, limit, share)
        assert p > 8 or time.process_time() - started < 10
        assert simulate(schedule, costs).bubble <= published + 0.005
        assert max(most_held(schedule, share)) <= limit + 1e-9


def test_the_limit_holds_for_whole_residuals_too():
    costs = Costs({"F": 18.5, "I": 18.1, "W": 9.3}, 0.6)
    schedule = auto(loop(4), 12, costs, 8)
    assert max(simulate(schedule, costs).most_residuals) <= 8


def test_with_the_memory_of_1f1b_it_is_no_longer_than_zb_h1():
    costs = Costs({"F": 3.0, "I": 4.0, "W": 2.0}, 0.1)
    found = simulate(auto(loop(4), 16, costs, 4), costs)
    assert found.longest_span <= simulate(zb_h1(4, 16), costs).longest_span


def test_over_a_v_it_is_no_longer_than_zb_v():
    costs = Costs()
    found = simulate(auto(vee(4), 12, costs, 8), costs)
    assert found.longest_span <= simulate(zb_v(4, 12), costs).longest_span
    assert max(found.most_residuals) <= 8


def test_each_rank_may_have_a_limit_of_its_own():
    schedule = auto(loop(3), 8, Costs(), (3, 2, 1))
    assert all(held <= limit for held, limit in zip(most_held(schedule), (3, 2, 1), strict=True))


def test_a_slow_stage_is_what_the_rest_is_scheduled_around():
    costs = Costs([{"F": 1, "I": 1, "W": 1}, {"F": 3, "I": 3, "W": 3}, {"F": 1, "I": 1, "W": 1}], 0.25)
    found = simulate(auto(loop(3), 12, costs, 6), costs)
    assert found.longest_span < simulate(one_f_one_b(3, 12), costs).longest_span
    assert found.bubble < 0.1


def test_residuals_between_the_two_parts_count_as_the_weight_share():
    assert most_held(zb_h1(2, 4)) == [2, 2]
    assert most_held(zb_h1(2, 4), 0.5) == [2, 1.5]


@pytest.mark.parametrize(
    ("placement", "limit", "wrong"),
    [
        (loop(2), 0.5, r"Rank 0 may hold 0\.5 residuals, but has 1 stages"),
        (vee(2), (4, 1), r"Rank 1 may hold 1 residuals, but has 2 stages"),
        (loop(3), (1, 1), r"2 limits for 3 ranks"),
    ],
)
def test_a_limit_that_nothing_can_keep_is_refused(placement, limit, wrong):
    with pytest.raises(ScheduleError, match=wrong):
        auto(placement, 4, Costs(), limit)
