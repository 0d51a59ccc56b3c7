"""Faults that people met elsewhere in pipeline or MLX training, as the smallest cases with exact numbers.

Each name starts with the kind of fault. Others of the same list are held where their module is tested: lost layers
(`test_partition`), frozen stages (`test_pipeline`), labels and rows that cannot be trained (`test_data`), ranks that
disagree (`test_ring_training`), order of delivery and dropped sends (`transports.contract`), live residuals and
evaluation (`property_tests/test_pipeline`), and initial adapters (`test_mlx_lm`).
"""

import math
import sys

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import mlx_lm
import pytest
from mlx_lm import fuse
from tiny import assert_bit_equal, batch, copied, leaves, llama, relative_difference, tiny

from pptrain import Pipeline, reference
from pptrain.cli import main
from pptrain.microbatch import Microbatch, cut


class Chain(nn.Module):
    """`y = x * w0 * w1 * ...` with x = 1 for each token: gradients that can be done in the head."""

    def __init__(self, *weights: float, dtype: mx.Dtype = mx.float32):
        super().__init__()
        self.layers = [nn.Linear(1, 1, bias=False) for _ in weights]
        for layer, weight in zip(self.layers, weights, strict=True):
            layer.weight = mx.array([[weight]], dtype)

    def __call__(self, tokens: mx.array) -> mx.array:
        hidden = mx.ones((*tokens.shape, 1), self.layers[0].weight.dtype)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden

    def weights(self) -> list[float]:
        return [layer.weight.item() for layer in self.layers]


def square(y: mx.array, targets: mx.array) -> mx.array:
    return (y[..., 0] - targets) ** 2


def times_target(y: mx.array, targets: mx.array) -> mx.array:
    return y[..., 0] * targets


def rows(*targets: int) -> tuple[mx.array, mx.array]:
    """One token and one target a row."""
    return mx.array([[0, target] for target in targets], mx.int32), mx.array([[1, 1]] * len(targets), mx.int32)


def test_loss_scaled_once_per_stage_two_weights_of_1_are_0_8_after_a_step():
    model = Chain(1.0, 1.0)
    pipeline = Pipeline(model, 2, loss=square)
    pipeline.step(optim.SGD(0.1), *rows(0, 0), num_microbatches=2)
    assert [mx.array(weight) for weight in model.weights()] == [mx.array(0.8), mx.array(0.8)]


def test_scaling_repeated_over_accumulation_k_times_m_microbatches_are_one_batch():
    parts = [batch(rows=3, seed=seed) for seed in range(4)]
    whole = [mx.concatenate(arrays) for arrays in zip(*parts, strict=True)]
    accumulated, at_once = tiny(3), tiny(3)
    one, other = optim.Adam(1e-2), optim.Adam(1e-2)
    Pipeline(accumulated, 3).step_microbatches(one, [m for part in parts for m in cut(*part, 3)], max_grad_norm=0.5)
    Pipeline(at_once, 2).step(other, *whole, num_microbatches=12, max_grad_norm=0.5)
    assert_bit_equal(accumulated.parameters(), at_once.parameters())
    assert_bit_equal(one.state, other.state)


def one_token_of_4_and_three_of_1() -> list[Microbatch]:
    few = Microbatch(mx.array([[0, 4, 9, 9]], mx.int32), mx.array([[1, 1]], mx.int32))
    many = Microbatch(mx.array([[0, 1, 1, 1]], mx.int32), mx.array([[1, 3]], mx.int32))
    return [few, many]


@pytest.mark.parametrize("num_stages", [1, 2])
def test_mean_of_means_is_1_75_and_not_2_5(num_stages):
    model, optimizer = Chain(1.0, 1.0), optim.SGD(0.0)
    done = Pipeline(model, num_stages, loss=times_target).step_microbatches(optimizer, one_token_of_4_and_three_of_1())
    assert done.loss == 1.75
    assert done.losses == (1.0, 0.75)
    assert done.num_tokens == 4


def test_mean_of_means_the_gradient_does_not_depend_on_the_cut_into_microbatches():
    few, many = one_token_of_4_and_three_of_1()
    tokens, lengths = mx.concatenate([few.tokens, many.tokens]), mx.concatenate([few.lengths, many.lengths])
    for num_stages, num_microbatches in [(1, 1), (1, 2), (2, 1), (2, 2)]:
        pipeline = Pipeline(Chain(1.0, 1.0), num_stages, loss=times_target)
        grads = leaves(pipeline.value_and_grad(tokens, lengths, num_microbatches).grads)
        assert [grad.item() for grad in grads.values()] == [1.75, 1.75]


@pytest.mark.parametrize("num_stages", [1, 3])
def test_a_fully_masked_microbatch_adds_zero_and_no_nan(num_stages):
    tokens, lengths = batch(rows=3)
    masked = mx.array([[5, 2]], mx.int32)
    pipeline = Pipeline(tiny(3), num_stages)
    expected = pipeline.value_and_grad(tokens, lengths, 3)
    more_tokens, more_lengths = mx.concatenate([tokens, tokens[:1]]), mx.concatenate([lengths, masked])
    found = pipeline.value_and_grad(more_tokens, more_lengths, 4)
    assert found.losses[3].item() == 0.0
    assert found.num_tokens == expected.num_tokens
    assert relative_difference(found.grads, expected.grads) == 0.0


@pytest.mark.parametrize("num_stages", [2, 3])
def test_tied_embeddings_get_the_lookups_part_plus_the_heads_and_count_once_in_the_norm(num_stages):
    tied, untied = tiny(3, tied=True), tiny(3)
    untied.update(tied.parameters())
    untied.head.weight = mx.array(tied.embed.weight)
    parts = leaves(reference.value_and_grad(untied, *batch(), 2).grads)
    expected = parts["embed.weight"] + parts["head.weight"]
    found = leaves(Pipeline(tied, num_stages).value_and_grad(*batch(), 2).grads)
    assert relative_difference(found["embed.weight"], expected) < 1e-6
    norm = math.sqrt(sum((grad**2).sum().item() for grad in found.values()))
    done = Pipeline(tied, num_stages).step(optim.SGD(0.0), *batch(), 2)
    assert done.grad_norm == pytest.approx(norm, rel=1e-6)


def test_clipping_two_stages_with_gradients_3_and_4_have_the_norm_5_and_one_factor():
    model = Chain(4.0, 3.0)  # y = w0 w1: the gradients are 3 and 4
    pipeline = Pipeline(model, 2, loss=times_target)
    done = pipeline.step(optim.SGD(1.0), *rows(1, 1), num_microbatches=2, max_grad_norm=1.0)
    assert done.grad_norm == 5.0
    assert [4 - model.weights()[0], 3 - model.weights()[1]] == pytest.approx([0.6, 0.8], rel=1e-6)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_low_precision_accumulation_512_gradients_of_1_are_512(num_stages):
    ones = [Microbatch(*rows(1)) for _ in range(512)]
    pipeline = Pipeline(Chain(1.0, 1.0, dtype=mx.bfloat16), num_stages, loss=lambda y, targets: 512 * y[..., 0])
    tokens = mx.concatenate([m.tokens for m in ones])
    grads = leaves(pipeline.value_and_grad(tokens, mx.concatenate([m.lengths for m in ones]), 512).grads)
    assert [(grad.dtype, grad.item()) for grad in grads.values()] == [(mx.float32, 512.0)] * 2


def test_low_precision_accumulation_bfloat16_parameters_stay_bfloat16():
    model, optimizer = tiny(2, dtype=mx.bfloat16), optim.AdamW(1e-2)
    before = copied(model.parameters())
    Pipeline(model, 2).step(optimizer, *batch(), 2, max_grad_norm=1.0)
    after = leaves(model.parameters())
    assert {array.dtype for array in after.values()} == {mx.bfloat16}
    assert all(mx.any(after[name] != before[name]).item() for name in after)


@pytest.mark.parametrize("num_stages", [1, 3])
def test_ragged_lengths_every_microbatch_contributes_and_the_sum_is_one_devices(num_stages):
    microbatches = [cut(*batch(rows=1, seq=seq, seed=seq + j), 1)[0] for j, seq in enumerate((5, 7, 5))]
    model, twin = tiny(3), tiny(3)
    done = Pipeline(model, num_stages).step_microbatches(optim.SGD(0.1), microbatches)
    one, norm = reference.step(twin, optim.SGD(0.1), microbatches)
    assert (done.loss, done.grad_norm) == (one.loss.item(), norm.item())
    assert_bit_equal(model.parameters(), twin.parameters())
    for left_out in range(3):
        others = [m for j, m in enumerate(microbatches) if j != left_out]
        less = reference.of_microbatches(tiny(3), others).grads
        assert relative_difference(less, one.grads) > 1e-3


def test_ragged_lengths_a_batch_of_7_in_3_is_one_devices():
    tokens, lengths = batch(rows=7, seq=5)
    model = llama(4)
    ours = Pipeline(model, 3).value_and_grad(tokens, lengths, 3)
    theirs = reference.value_and_grad(model, tokens, lengths, 3)
    assert [m.tokens.shape[0] for m in cut(tokens, lengths, 3)] == [3, 2, 2]
    assert_bit_equal(ours.grads, theirs.grads)


def test_fuse_on_a_quantized_base_keeps_the_adapters_logits(demo_directory, tmp_path, monkeypatch):
    model, adapters = str(tmp_path / "model"), str(tmp_path / "adapters")
    mlx_lm.convert(str(demo_directory / "model"), model, quantize=True, q_group_size=32, q_bits=4)
    where = ["--model", model, "--data", str(demo_directory / "data"), "--adapter-path", adapters]
    run = ["--num-layers", "-1", "--iters", "8", "--val-batches", "0", "--learning-rate", "1e-2", "--stages", "3"]
    assert main(["train", *where, *run, "--max-seq-length", "64"]) == 0
    tokens = mx.array([list(b"what comes after abc?")])

    def logits(directory: str, adapter_path: str | None = None) -> mx.array:
        return mlx_lm.load(directory, adapter_path=adapter_path)[0](tokens)

    def fused(out: str, *more: str) -> mx.array:
        argv = ["fuse", "--model", model, "--adapter-path", adapters, "--save-path", out, *more]
        monkeypatch.setattr(sys, "argv", argv)
        fuse.main()
        return logits(out)

    adapted, base = logits(model, adapters), logits(model)
    exact, quantized = fused(str(tmp_path / "exact"), "--dequantize"), fused(str(tmp_path / "quantized"))
    # What quantizing does to the base is what quantizing the fused weights may do again.
    quantization_error = apart(base, logits(str(demo_directory / "model")))
    assert apart(exact, adapted) < 1e-4
    assert apart(base, adapted) > 3 * quantization_error
    assert apart(quantized, adapted) < 1.5 * quantization_error


def apart(found: mx.array, expected: mx.array) -> float:
    return relative_difference({"logits": found}, {"logits": expected})
