"""Every layer in exactly one stage, in order, whatever the number of layers and stages."""

from __future__ import annotations

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


@given(num_layers=st.integers(0, 20), num_stages=st.integers(-20, 0))
def test_no_stage_at_all_is_refused(num_layers: int, num_stages: int):
    with pytest.raises(PartitionError, match=f"{num_stages} stages were asked for"):
        partition.even(num_layers, num_stages)
