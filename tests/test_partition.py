import pytest

from pptrain.errors import PartitionError
from pptrain.partition import balanced, even, explicit, ranges, roomiest, sites


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "sizes"),
    [
        (10, 3, (3, 4, 3)),
        (30, 4, (7, 8, 8, 7)),
        (8, 4, (2, 2, 2, 2)),
        (5, 5, (1, 1, 1, 1, 1)),
        (7, 1, (7,)),
        (11, 4, (3, 3, 3, 2)),
    ],
)
def test_the_remainder_is_spread_over_the_middle_stages(num_layers, num_stages, sizes):
    assert even(num_layers, num_stages) == sizes


def test_more_stages_than_layers_is_refused_for_every_pair_up_to_12():
    for num_layers in range(12):
        for num_stages in range(num_layers + 1, 13):
            with pytest.raises(PartitionError) as caught:
                even(num_layers, num_stages)
            assert f"{num_layers} layer" in str(caught.value)
            assert f"{num_stages} stages" in str(caught.value)


@pytest.mark.parametrize("num_stages", [0, -1])
def test_a_model_has_at_least_one_stage(num_stages):
    with pytest.raises(PartitionError, match=rf"{num_stages} stages were asked for"):
        even(4, num_stages)


def test_an_explicit_cut_is_kept():
    assert explicit(28, [10, 8, 10]) == (10, 8, 10)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((3, 3), r"3,3 covers 6 layers .* has 7 layers.*4,3"),
        ((4, 4), r"4,4 covers 8 layers .* has 7 layers"),
        ((7, 0), r"7,0 covers 7 layers with 0 in its smallest stage"),
        ((8, -1), r"8,-1 covers 7 layers with -1 in its smallest stage"),
        ((1,) * 8, r"Cannot divide 7 layers into 8 stages.*between 1 and 7"),
        ((), r"0 stages were asked for"),
    ],
)
def test_an_explicit_cut_covers_every_layer_once(sizes, expected):
    with pytest.raises(PartitionError, match=expected):
        explicit(7, sizes)


def test_an_explicit_cut_has_as_many_entries_as_stages():
    with pytest.raises(PartitionError, match=r"3,4 lists 2 stages, but 3 stages were asked for"):
        explicit(7, (3, 4), 3)


def test_ranges_are_of_whole_model_layer_numbers():
    assert ranges((3, 4, 3)) == (range(0, 3), range(3, 7), range(7, 10))


def nothing(stage, sites):
    return 0


def test_the_first_stage_has_the_embedding_and_the_last_layer_has_the_head():
    assert [sites(layers) for layers in ranges((2, 1, 1))] == [range(0, 3), range(3, 4), range(4, 5)]


def test_a_balanced_cut_of_equal_layers_is_even():
    assert balanced([[0, 1, 1, 1, 1, 1, 1, 1, 1]] * 4, nothing, [0] * 4) == (2, 2, 2, 2)


def test_a_head_that_costs_two_layers_takes_two_layers_from_its_stage():
    assert balanced([[0, 1, 1, 1, 1, 1, 3]] * 2, nothing, [0] * 2) == (4, 2)


def test_an_embedding_that_costs_counts_for_the_first_stage():
    assert balanced([[2, 1, 1, 1, 1, 1, 1]] * 2, nothing, [0] * 2) == (2, 4)


def test_a_rank_that_is_three_times_as_fast_gets_three_times_the_layers():
    assert balanced([[0] + [1] * 8, [0] + [3] * 8], nothing, [0] * 2) == (6, 2)


def test_a_machine_with_less_memory_gets_what_fits_and_no_more():
    weights = [5, 10, 10, 10, 10, 10, 10]
    needs = lambda stage, sites: sum(weights[site] for site in sites)  # noqa: E731
    assert balanced([[0, 1, 1, 1, 1, 1, 1]] * 2, needs, [100, 100]) == (3, 3)
    assert balanced([[0, 1, 1, 1, 1, 1, 1]] * 2, needs, [45, 20]) == (4, 2)
    assert balanced([[0, 1, 1, 1, 1, 1, 1]] * 2, needs, [20, 50]) == (1, 5)


def test_of_cuts_with_the_same_longest_stage_the_others_are_close_to_each_other():
    # 4 is the longest in any cut: its neighbours could be 1, 3 as well.
    assert balanced([[0, 1, 1, 1, 1, 4]] * 3, nothing, [0] * 3) == (2, 2, 1)


def test_a_model_that_no_cut_makes_fit_is_refused_with_the_closest_cut_and_its_fullest_stage():
    needs = lambda stage, sites: 10e9 * len(sites)  # noqa: E731
    with pytest.raises(
        PartitionError, match=r"No cut of 4 layers .* 3,1, stage 0 needs 40\.00 GB of 30\.00 GB.*recomp"
    ):
        balanced([[0, 1, 1, 1, 1]] * 2, needs, [30e9, 10e9])
    assert roomiest(4, needs, [30e9, 10e9]) == (3, 1)


def test_a_balanced_cut_of_more_stages_than_layers_is_refused():
    with pytest.raises(PartitionError, match="Cannot divide 2 layers into 3 stages"):
        balanced([[0, 1, 1]] * 3, nothing, [0] * 3)
