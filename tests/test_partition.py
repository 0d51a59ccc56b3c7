import pytest

from pptrain.errors import PartitionError
from pptrain.partition import even, explicit, ranges


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
