import math

import mlx.core as mx
import numpy as np
import pytest
from tiny import batch, same_bits

from pptrain.errors import BatchError
from pptrain.microbatch import (
    Microbatch,
    count_tokens,
    cross_entropy,
    cut,
    kept_random_state,
    loss_share,
    mask_seed,
)


def rows_of(microbatches):
    return [m.tokens.shape[0] for m in microbatches]


@pytest.mark.parametrize(
    ("rows", "num_microbatches", "sizes"),
    [(7, 3, [3, 2, 2]), (4, 4, [1, 1, 1, 1]), (6, 2, [3, 3]), (5, 1, [5]), (11, 4, [3, 3, 3, 2])],
)
def test_the_larger_microbatches_come_first(rows, num_microbatches, sizes):
    assert rows_of(cut(*batch(rows), num_microbatches)) == sizes


def test_microbatches_keep_the_rows_their_order_and_the_padded_width():
    tokens, lengths = batch(7)
    parts = cut(tokens, lengths, 3)
    assert same_bits(mx.concatenate([m.tokens for m in parts]), tokens)
    assert same_bits(mx.concatenate([m.lengths for m in parts]), lengths)


@pytest.mark.parametrize("num_microbatches", [0, -1, 5])
def test_a_microbatch_has_at_least_one_row(num_microbatches):
    with pytest.raises(BatchError, match=rf"4 examples cannot be cut into {num_microbatches} .*between 1 and 4"):
        cut(*batch(4), num_microbatches)


@pytest.mark.parametrize(
    ("tokens", "lengths"), [((4,), (4, 2)), ((4, 1), (4, 2)), ((4, 6), (3, 2)), ((4, 6), (4,)), ((4, 6), (4, 3))]
)
def test_tokens_and_lengths_that_do_not_fit_are_refused_with_their_shapes(tokens, lengths):
    with pytest.raises(BatchError) as caught:
        cut(mx.zeros(tokens, mx.int32), mx.zeros(lengths, mx.int32), 2)
    assert str(tokens) in str(caught.value)
    assert str(lengths) in str(caught.value)


def test_inputs_are_all_tokens_but_the_last():
    assert Microbatch(mx.array([[1, 2, 3]]), mx.array([[1, 2]])).inputs.tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("lengths", "count"),
    [
        ((1, 5), 5),
        ((2, 4), 3),
        ((3, 3), 1),
        ((0, 5), 5),  # as mlx-lm: an offset of 0 is no position
        ((1, 9), 5),  # positions past the width count nothing
        ((5, 4), 0),
        ((7, 9), 0),
        ((0, 0), 0),
    ],
)
def test_tokens_are_counted_as_the_mask_of_the_loss_counts_them(lengths, count):
    microbatch = Microbatch(mx.zeros((1, 6), mx.int32), mx.array([lengths]))
    ones = loss_share(mx.zeros((1, 5, 3)), microbatch, mx.array(1.0), lambda logits, targets: mx.ones(targets.shape))
    assert microbatch.num_tokens == count
    assert ones.item() == count


def test_tokens_of_all_microbatches_count_together():
    assert count_tokens(cut(*batch(4, seq=6), 2)) == (6 - 1) + 5 + 4 + 3


def test_a_batch_in_which_no_token_counts_is_refused():
    masked = [Microbatch(mx.zeros((2, 4), mx.int32), mx.array([[3, 2], [5, 5]]))] * 3
    with pytest.raises(BatchError, match=r"all of its 3 microbatches are fully masked"):
        count_tokens(masked)


def test_the_share_is_the_sum_of_unmasked_token_losses_over_the_whole_batchs_tokens():
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(2, 4, 5)).astype(np.float32)
    tokens, spans = np.array([[0, 1, 2, 3, 4], [4, 3, 2, 1, 0]], np.int32), [(2, 3), (1, 4)]
    expected = 0.0
    for row, (first, last) in enumerate(spans):
        for position in range(first, last + 1):
            row_logits = logits[row, position - 1].astype(np.float64)
            expected += math.log(np.exp(row_logits).sum()) - row_logits[tokens[row, position]]
    microbatch = Microbatch(mx.array(tokens), mx.array(spans))
    share = loss_share(mx.array(logits), microbatch, mx.array(10.0))
    assert share.item() == pytest.approx(expected / 10, rel=1e-6)


def test_a_share_is_float32_though_the_logits_are_not():
    share = loss_share(mx.zeros((2, 6, 5), mx.bfloat16), cut(*batch(2), 1)[0], mx.array(3.0))
    assert share.dtype == mx.float32


def test_the_token_loss_is_one_loss_a_token():
    assert (
        cross_entropy(mx.zeros((2, 3, 4)), mx.zeros((2, 3), mx.int32)).tolist()
        == [[pytest.approx(math.log(4))] * 3] * 2
    )


def test_random_masks_differ_by_seed_step_microbatch_and_site():
    seeds = {mask_seed(*numbers) for numbers in np.ndindex(4, 4, 4, 4)}
    assert len(seeds) == 4**4
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert mask_seed(1, 11, 0, 0) != mask_seed(11, 1, 0, 0)


def test_the_random_state_is_kept_though_the_body_fails():
    mx.random.seed(5)
    mx.random.normal((3,))
    before = np.array(mx.random.state[0])

    def fails():
        with kept_random_state():
            mx.random.seed(2**63 + 1)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert np.array_equal(np.array(mx.random.state[0]), before)
