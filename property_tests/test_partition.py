"""Every layer in exactly one stage, in order, whatever the number of layers and stages."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import cuts, plain_model

from pptrain import partition
from pptrain.errors import PartitionError
from pptrain.pipeline import Pipeline

TOO_MANY_STAGES = [(num_layers, p) for p in range(2, 13) for num_layers in range(1, p)]


@pytest.mark.parametrize("num_layers", range(1, 201))
def test_an_even_cut_covers_every_layer_once_with_sizes_one_apart(num_layers: int):
    for num_stages in range(1, num_layers + 1):
        sizes = partition.even(num_layers, num_stages)
        assert len(sizes) == num_stages
        assert [layer for stage in partition.ranges(sizes) for layer in stage] == list(range(num_layers))
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1
        # The last stage has the head as well: it is never the one that is longer.
        assert sizes[-1] == min(sizes)


@given(data=st.data(), num_layers=st.integers(1, 60))
def test_any_legal_cut_is_taken_as_it_is(data: st.DataObject, num_layers: int):
    sizes = data.draw(cuts(num_layers))
    assert partition.explicit(num_layers, sizes) == sizes
    assert partition.explicit(num_layers, list(sizes), len(sizes)) == sizes
    assert [layer for stage in partition.ranges(sizes) for layer in stage] == list(range(num_layers))


@given(num_layers=st.integers(1, 20), sizes=st.lists(st.integers(-2, 12), max_size=8))
def test_a_cut_is_refused_unless_it_covers_every_layer_once(num_layers: int, sizes: list[int]):
    if sizes and min(sizes) >= 1 and sum(sizes) == num_layers:
        assert partition.explicit(num_layers, sizes) == tuple(sizes)
        return
    with pytest.raises(PartitionError, match=r"^\[(layers|stages)\] "):
        partition.explicit(num_layers, sizes)


@given(data=st.data(), num_layers=st.integers(1, 20), num_stages=st.integers(1, 20))
def test_a_cut_into_another_number_of_stages_is_refused(data: st.DataObject, num_layers: int, num_stages: int):
    sizes = data.draw(cuts(num_layers).filter(lambda sizes: len(sizes) != num_stages))
    with pytest.raises(PartitionError, match=f"lists {len(sizes)} stages, but {num_stages} stages were asked for"):
        partition.explicit(num_layers, sizes, num_stages)


@pytest.mark.parametrize(("num_layers", "num_stages"), TOO_MANY_STAGES)
def test_more_stages_than_layers_are_refused_with_both_numbers(num_layers: int, num_stages: int):
    claim = rf"Cannot divide {num_layers} layers? into {num_stages} stages.* between 1 and {num_layers} stages"
    with pytest.raises(PartitionError, match=claim):
        partition.even(num_layers, num_stages)
    with pytest.raises(PartitionError, match=claim):
        partition.explicit(num_layers, [1] * num_stages)
    with pytest.raises(PartitionError, match=claim):
        Pipeline(plain_model(num_layers), num_stages)


def every_cut(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    """All of them, one by one: the brute force that a balanced cut is compared with."""
    ends = [(0, *inner, num_layers) for inner in combinations(range(1, num_layers), num_stages - 1)]
    return [tuple(b - a for a, b in pairwise(cut)) for cut in ends]


@given(data=st.data(), num_layers=st.integers(1, 10), num_stages=st.integers(1, 4))
def test_no_cut_is_better_than_the_balanced_one(data: st.DataObject, num_layers: int, num_stages: int):
    num_stages = min(num_layers, num_stages)
    numbers = st.lists(st.integers(0, 9), min_size=num_layers + 1, max_size=num_layers + 1)
    costs, held = (
        data.draw(st.lists(numbers, min_size=num_stages, max_size=num_stages), label) for label in ("costs", "held")
    )
    limits = data.draw(st.lists(st.integers(1, 60), min_size=num_stages, max_size=num_stages), "limits")

    def of(table: list[list[int]], sizes: tuple[int, ...]) -> list[int]:
        stages = enumerate(map(partition.sites, partition.ranges(sizes)))
        return [sum(table[stage][site] for site in sites) for stage, sites in stages]

    # Not a sum over sites: the largest counts twice, as what is recomputed does.
    needs = lambda stage, sites: sum(held[stage][s] for s in sites) + max(held[stage][s] for s in sites)  # noqa: E731

    def needed(sizes: tuple[int, ...]) -> list[int]:
        return [needs(stage, sites) for stage, sites in enumerate(map(partition.sites, partition.ranges(sizes)))]

    cuts = every_cut(num_layers, num_stages)
    fitting = [c for c in cuts if all(n <= limit for n, limit in zip(needed(c), limits, strict=True))]
    if not fitting:
        with pytest.raises(PartitionError, match=f"No cut of {num_layers} layers"):
            partition.balanced(costs, needs, limits)
        share = min(max(n / limit for n, limit in zip(needed(c), limits, strict=True)) for c in cuts)
        roomiest = partition.roomiest(num_layers, needs, limits)
        assert max(n / limit for n, limit in zip(needed(roomiest), limits, strict=True)) == share
        return
    found = partition.balanced(costs, needs, limits)
    assert found in fitting
    longest = min(max(of(costs, c)) for c in fitting)
    assert max(of(costs, found)) == longest
    as_good = [of(costs, c) for c in fitting if max(of(costs, c)) == longest]
    assert sum(c * c for c in of(costs, found)) == min(sum(c * c for c in each) for each in as_good)


@given(num_layers=st.integers(0, 20), num_stages=st.integers(-20, 0))
def test_no_stage_at_all_is_refused(num_layers: int, num_stages: int):
    with pytest.raises(PartitionError, match=f"{num_stages} stages were asked for"):
        partition.even(num_layers, num_stages)
