"""Every row and every unmasked token counts once, however the batch is cut."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import VOCABULARY, BatchCase, batches, cut_batches

from pptrain.errors import BatchError
from pptrain.microbatch import Microbatch, count_tokens, cross_entropy, cut, kept_random_state, loss_share, mask_seed


def logits_of(microbatch: Microbatch, seed: int) -> mx.array:
    """Random logits `[microbatch_size, seq, vocab]`, the same for a row in whatever microbatch it is."""
    table = np.random.default_rng(seed).normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32)
    return mx.array(table)[microbatch.inputs]


def token_losses(batch: BatchCase, seed: int) -> list[float]:
    """The losses of the unmasked tokens, one by one, in float64."""
    logits = np.asarray(logits_of(batch.microbatch, seed)).astype(np.float64)
    tokens = np.asarray(batch.tokens)
    return [
        float(np.log(np.exp(logits[row, t - 1]).sum()) - logits[row, t - 1, tokens[row, t]])
        for row, (first, last) in enumerate(batch.lengths)
        for t in range(1, batch.width + 1)
        if first <= t <= last
    ]


@given(case=cut_batches(max_microbatches=8))
def test_a_cut_has_every_row_once_in_order_the_larger_parts_first(case: tuple[BatchCase, int]):
    batch, num_microbatches = case
    parts = cut(batch.tokens, batch.bounds, num_microbatches)
    sizes = [part.tokens.shape[0] for part in parts]
    assert len(parts) == num_microbatches
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1
    assert np.array_equal(np.concatenate([part.tokens for part in parts]), batch.tokens)
    assert np.array_equal(np.concatenate([part.lengths for part in parts]), batch.bounds)


@given(case=cut_batches(), seed=st.integers(0, 2**16))
def test_the_shares_of_the_loss_add_up_to_the_mean_over_unmasked_tokens(case: tuple[BatchCase, int], seed: int):
    batch, num_microbatches = case
    parts, losses = cut(batch.tokens, batch.bounds, num_microbatches), token_losses(batch, seed)
    assert count_tokens(parts) == batch.num_tokens == len(losses)
    count = mx.array(count_tokens(parts), mx.float32)
    shares = [loss_share(logits_of(part, seed), part, count, cross_entropy).item() for part in parts]
    assert sum(shares) == pytest.approx(sum(losses) / len(losses), rel=1e-5)


@given(case=cut_batches(), seed=st.integers(0, 2**16))
def test_a_fully_masked_microbatch_adds_exactly_nothing(case: tuple[BatchCase, int], seed: int):
    batch, num_microbatches = case
    count = mx.array(batch.num_tokens, mx.float32)
    for part in cut(batch.tokens, batch.bounds, num_microbatches):
        loss, grad = mx.value_and_grad(lambda x, part=part: loss_share(x, part, count, cross_entropy))(
            logits_of(part, seed)
        )
        targets = np.asarray(part.lengths)
        counts = [[first <= t <= last for t in range(1, batch.width + 1)] for first, last in targets.tolist()]
        reached = np.abs(np.asarray(grad)).max(axis=-1) > 0
        assert np.array_equal(reached, np.array(counts))
        assert part.num_tokens == int(np.sum(counts))
        if not part.num_tokens:
            assert loss.item() == 0.0


@given(batch=batches(), data=st.data())
def test_a_batch_without_an_unmasked_token_is_refused(batch: BatchCase, data: st.DataObject):
    num_microbatches = data.draw(st.integers(1, len(batch.lengths)))
    empty = st.sampled_from([(1, 0), (2, 1), (batch.width + 1, batch.width + 1), (0, 0)])
    lengths = data.draw(st.lists(empty, min_size=len(batch.lengths), max_size=len(batch.lengths)))
    with pytest.raises(BatchError, match=f"all of its {num_microbatches} microbatches are fully masked"):
        count_tokens(cut(batch.tokens, mx.array(lengths), num_microbatches))


@given(batch=batches(), more=st.integers(1, 10))
def test_more_microbatches_than_rows_are_refused_with_both_numbers(batch: BatchCase, more: int):
    rows = len(batch.lengths)
    with pytest.raises(BatchError, match=f"batch of {rows} examples cannot be cut into {rows + more} microbatches"):
        cut(batch.tokens, batch.bounds, rows + more)
    with pytest.raises(BatchError, match=f"Use between 1 and {rows} microbatches"):
        cut(batch.tokens, batch.bounds, 1 - more)


places = st.tuples(*[st.integers(0, 2**40)] * 4)


@given(one=places, other=places)
def test_random_masks_depend_on_each_part_of_their_place(one: tuple[int, ...], other: tuple[int, ...]):
    assert (mask_seed(*one) == mask_seed(*other)) == (one == other)
    for i in range(4):
        moved = [part + (i == j) for j, part in enumerate(one)]
        assert mask_seed(*moved) != mask_seed(*one)
    assert 0 <= mask_seed(*one) < 2**64


@given(seed=st.integers(0, 2**64 - 1), draws=st.integers(0, 3), inside=st.integers(0, 3))
def test_a_kept_random_state_goes_on_as_if_nothing_had_been_drawn(seed: int, draws: int, inside: int):
    def draw(times: int) -> list[float]:
        return [mx.random.uniform().item() for _ in range(times)]

    mx.random.seed(seed)
    draw(draws)
    expected = draw(3)
    mx.random.seed(seed)
    draw(draws)
    with kept_random_state():
        mx.random.seed(1)
        draw(inside)
    assert draw(3) == expected
