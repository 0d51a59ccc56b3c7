"""The law, held to what does not come from it: mlx-lm's own loss, NumPy in float64, and sums by hand."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx_lm.tuner.trainer import default_loss
from tiny import assert_bit_equal, batch, copied, leaves, llama, put_lora_on, relative_difference, same_bits, tiny

from pptrain import reference
from pptrain.microbatch import cut, loss_share
from pptrain.optimizer import to_tree

ROWS = 5


def lora():
    model = llama(3)
    put_lora_on(model)
    return model


def token_losses(model, tokens):
    """Negative log-likelihood of each target, `[rows, seq]`, in float64."""
    logits = np.asarray(model(tokens[:, :-1])).astype(np.float64)
    targets = np.asarray(tokens)[:, 1:, None]
    return np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, targets, -1)[..., 0]


def mask_of(tokens, lengths):
    positions = np.arange(1, tokens.shape[1])
    first, last = np.asarray(lengths).T[..., None]
    return (positions >= first) & (positions <= last)


# -- loss and gradients ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: tiny(3), lambda: tiny(2, tied=True), lambda: llama(3), lora])
def test_one_microbatch_is_mlx_lms_own_loss_and_gradients_bit_for_bit(make):
    model, (tokens, lengths) = make(), batch(ROWS)
    result = reference.value_and_grad(model, tokens, lengths, 1)
    (loss, count), grads = nn.value_and_grad(model, default_loss)(model, tokens, lengths)
    assert same_bits(result.loss, loss)
    assert result.num_tokens == count.item()
    assert_bit_equal(result.grads, grads)


@pytest.mark.parametrize("m", [1, 2, 5])
def test_the_loss_is_all_token_losses_over_all_unmasked_tokens(m):
    model, (tokens, lengths) = tiny(3), batch(ROWS)
    losses, mask = token_losses(model, tokens), mask_of(tokens, lengths)
    result = reference.value_and_grad(model, tokens, lengths, m)
    assert result.num_tokens == mask.sum()
    assert result.loss.item() == pytest.approx((losses * mask).sum() / mask.sum(), rel=1e-6)
    assert len(result.losses) == m
    assert sum(share.item() for share in result.losses) == pytest.approx(result.loss.item(), rel=1e-6)


def test_tokens_weigh_the_same_in_a_short_microbatch_and_in_a_long_one():
    model, (tokens, _) = tiny(2), batch(2, seq=8)
    lengths = mx.array([[1, 8], [8, 8]])
    per_token = token_losses(model, tokens)
    result = reference.value_and_grad(model, tokens, lengths, 2)
    assert result.loss.item() == pytest.approx((per_token[0].sum() + per_token[1, 7]) / 9, rel=1e-6)
    mean_of_means = (per_token[0].mean() + per_token[1, 7]) / 2
    assert abs(result.loss.item() - mean_of_means) > 1e-3
    assert relative_difference(result.grads, reference.value_and_grad(model, tokens, lengths, 1).grads) < 1e-5


def test_a_fully_masked_microbatch_adds_nothing():
    model, (tokens, _) = tiny(2), batch(2)
    both = reference.value_and_grad(model, tokens, mx.array([[1, 6], [2, 1]]), 2)
    alone = reference.value_and_grad(model, tokens[:1], mx.array([[1, 6]]), 1)
    assert both.losses[1].item() == 0
    assert both.loss.item() == alone.loss.item()
    assert relative_difference(both.grads, alone.grads) == 0


def test_gradients_by_finite_differences():
    model, (tokens, lengths) = tiny(2), batch(ROWS)
    grads, mask = leaves(reference.value_and_grad(model, tokens, lengths, 3).grads), mask_of(tokens, lengths)
    weight, eps = model.layers[0].linear.weight, 1e-2
    for at in [(0, 0), (3, 5), (7, 2)]:
        around = []
        for sign in (1, -1):
            model.layers[0].linear.weight = weight.at[at].add(sign * eps)
            around.append((token_losses(model, tokens) * mask).sum() / mask.sum())
        slope = (around[0] - around[1]) / (2 * eps)
        assert grads["layers.0.linear.weight"][at].item() == pytest.approx(slope, rel=2e-3, abs=1e-5)


def test_gradients_of_bfloat16_parameters_are_added_in_float32():
    model, (tokens, lengths), m = tiny(2, dtype=mx.bfloat16), batch(ROWS), 5
    result = reference.value_and_grad(model, tokens, lengths, m)
    parts = []
    for microbatch in cut(tokens, lengths, m):
        share = lambda x=microbatch: loss_share(model(x.inputs), x, mx.array(float(result.num_tokens)))  # noqa: E731
        parts.append(leaves(nn.value_and_grad(model, share)()[1]))
    sums, rounded = dict[str, mx.array](), dict[str, mx.array]()
    for name in parts[0]:
        assert parts[0][name].dtype == mx.bfloat16
        sums[name] = sum((part[name].astype(mx.float32) for part in parts[1:]), parts[0][name].astype(mx.float32))
        rounded[name] = sum((part[name] for part in parts[1:]), parts[0][name]).astype(mx.float32)
    assert_bit_equal(result.grads, to_tree(sums))
    assert relative_difference(result.grads, to_tree(rounded)) > 1e-3


def test_a_users_loss_is_used():
    def squared(logits, targets):
        return (logits.sum(-1) - targets) ** 2

    model, (tokens, lengths) = tiny(2), batch(ROWS)
    mask = mask_of(tokens, lengths)
    expected = np.asarray(squared(model(tokens[:, :-1]), tokens[:, 1:])).astype(np.float64)
    result = reference.value_and_grad(model, tokens, lengths, 2, loss=squared)
    assert result.loss.item() == pytest.approx((expected * mask).sum() / mask.sum(), rel=1e-6)


# -- dropout -----------------------------------------------------------------------------------------------------------


class Seen(nn.Dropout):
    """Dropout that remembers what it let through."""

    def __init__(self, rate, masks):
        super().__init__(rate)
        self.masks = masks

    def __call__(self, x):
        kept = super().__call__(mx.ones(x.shape))
        self.masks.append(kept.tolist())
        return x * kept


def masks(seed, step, microbatch, rates=(0.5, 0.5, 0.5)):
    """The mask of each layer in one forward."""
    model, seen = tiny(3), []
    for layer, rate in zip(model.layers, rates, strict=True):
        layer.dropout = Seen(rate, seen)
    with reference.masks_of(model, seed, step, microbatch):
        mx.eval(model(mx.zeros((2, 6), mx.int32)))
    return [str(mask) for mask in seen]


def test_masks_depend_on_seed_step_microbatch_and_layer():
    drawn = [masks(*where) for where in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)]]
    assert len({mask for each in drawn for mask in each}) == 5 * 3


def test_masks_depend_on_nothing_else():
    mx.random.seed(1)
    first = masks(3, 2, 1)
    mx.random.seed(2)
    assert masks(3, 2, 1) == first
    # Neither on what the layers before have drawn: without dropout in layer 0, layers 1 and 2 draw the same.
    without = masks(3, 2, 1, rates=(0.0, 0.5, 0.5))
    assert without[0] != first[0]
    assert without[1:] == first[1:]


def test_a_step_with_dropout_can_be_repeated_and_the_random_state_is_left_as_it_was():
    model = tiny(3, dropout=0.3)
    mx.random.seed(11)
    state = mx.array(mx.random.state[0])
    results = [reference.value_and_grad(model, *batch(), 2, seed=1, step=s) for s in (4, 4, 5)]
    assert same_bits(mx.random.state[0], state)
    assert_bit_equal(results[0].grads, results[1].grads)
    assert results[0].loss.item() == results[1].loss.item() != results[2].loss.item()


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_unpatched_afterwards_even_if_the_loss_raises(fails):
    def loss(logits, targets):
        if fails:
            raise ArithmeticError("the user's own")
        return nn.losses.cross_entropy(logits, targets)

    model = tiny(2)
    before, classes = copied(model.parameters()), [type(module) for module in model.modules()]
    mx.random.seed(5)
    state = mx.array(mx.random.state[0])
    if fails:
        with pytest.raises(ArithmeticError, match="the user's own"):
            reference.value_and_grad(model, *batch(), 2, loss=loss)
    else:
        reference.value_and_grad(model, *batch(), 2, loss=loss)
    assert [type(module) for module in model.modules()] == classes
    assert same_bits(mx.random.state[0], state)
    assert_bit_equal(model.parameters(), to_tree(before))


# -- steps and evaluation ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [None, 0.5, 2.0])
def test_a_step_of_sgd_is_the_clipped_gradient_times_the_learning_rate(share):
    model, microbatches = tiny(2), cut(*batch(), 2)
    before, grads = copied(model.parameters()), leaves(reference.of_microbatches(model, microbatches).grads)
    expected = np.sqrt(sum((np.asarray(grad).astype(np.float64) ** 2).sum() for grad in grads.values()))
    limit = None if share is None else share * expected
    result, norm = reference.step(model, optim.SGD(0.1), microbatches, max_grad_norm=limit)
    assert norm.item() == pytest.approx(expected, rel=1e-6)
    assert_bit_equal(result.grads, to_tree(grads))  # unclipped
    factor = min(share or 1.0, 1.0)
    moved = {name: before[name] - 0.1 * factor * grad for name, grad in grads.items()}
    assert relative_difference(model.parameters(), to_tree(moved)) < 1e-5


def test_evaluation_sums_token_losses_without_dropout_and_goes_back_to_training():
    model, (tokens, lengths) = tiny(2, dropout=0.5), batch(ROWS)
    total = reference.loss_sum(model, cut(tokens, lengths, 2)).item()
    assert model.training
    model.eval()
    assert total == pytest.approx((token_losses(model, tokens) * mask_of(tokens, lengths)).sum(), rel=1e-6)
    reference.loss_sum(model, cut(tokens, lengths, 2))
    assert not model.training


def test_one_device_counts_its_steps_for_dropout():
    model, microbatches = tiny(2, dropout=0.5), cut(*batch(), 2)
    device, still = reference.OneDevice(model, seed=3), optim.SGD(0.0)
    losses = [device.step_microbatches(still, microbatches).loss for _ in range(2)]
    expected = [reference.of_microbatches(model, microbatches, seed=3, step=s).loss.item() for s in range(2)]
    assert losses == expected
    assert losses[0] != losses[1]
    assert device.everybody(1.5) == [1.5]


def test_frozen_parameters_have_no_gradient_and_do_not_move():
    model = lora()
    before, microbatches = copied(model.parameters()), cut(*batch(), 2)
    result, _ = reference.step(model, optim.Adam(1e-2), microbatches)
    trained = set(leaves(model.trainable_parameters()))
    assert set(leaves(result.grads)) == trained
    moved = {name for name, array in leaves(model.parameters()).items() if not same_bits(array, before[name])}
    assert moved == trained
