import gc
import itertools

import mlx.core as mx
import pytest
from tiny import assert_bit_equal, batch, copied, count_layer_forwards, put_lora_on, same_bits, tiny

from pptrain import reference
from pptrain.errors import ScheduleError
from pptrain.microbatch import count_tokens, cross_entropy, cut
from pptrain.model import ArraySpec
from pptrain.optimizer import to_tree
from pptrain.partition import ranges
from pptrain.segment import Cut, Work
from pptrain.stage import Stage
from transports.buffers import bytes_of, fill, poisoned

RECOMPUTE = ["none", "layer", "stage"]


def stages_of(model, sizes, recompute="none"):
    shared = Cut.of(model, mx.zeros((1, 4), mx.int32), cross_entropy)
    return [Stage(shared, stage, layers, recompute) for stage, layers in enumerate(ranges(sizes))]


def works_of(rows=4, m=2):
    microbatches = cut(*batch(rows), m)
    count = mx.array(count_tokens(microbatches), mx.float32)
    return [Work(microbatch, j, count, 0, 0) for j, microbatch in enumerate(microbatches)]


def evaluated(parts):
    """Evaluate parts one after another; returns how many layer forwards that took."""
    forwards = 0
    for arrays in parts:
        forwards += count_layer_forwards(*arrays)
        mx.eval(*arrays)
    return forwards


def forward(stages, work):
    """One microbatch through all stages; returns the buffers into which their cotangents go, and layer forwards."""
    boundary, buffers, forwards = [], [], 0
    for stage in stages:
        cotangents = [] if stage.is_last else [poisoned(spec.shape, spec.dtype) for spec in stage.specs_back(work)]
        boundary = stage.forward(work, boundary, cotangents)
        forwards += evaluated([boundary])
        buffers.append(cotangents)
    return buffers, forwards


def backward(stages, work, buffers, split=False):
    """One microbatch's backward through all stages; returns layer forwards."""
    forwards, cotangents = 0, []
    for stage, buffer in zip(reversed(stages), reversed(buffers), strict=True):
        for array, sent in zip(buffer, cotangents, strict=True):
            fill(array, bytes_of(sent))
        if split:
            forwards += evaluated(stage.backward_input(work.index, buffer))
        else:
            forwards += evaluated(stage.backward(work.index, buffer))
        cotangents = stage.take_input_cotangents(work.index) if stage.passes_cotangent else []
    if split:
        forwards += sum(evaluated(stage.backward_weights(work.index)) for stage in stages)
    return forwards


def grads_of(model, stages):
    grads = {name: grad for stage in stages for name, grad in stage.grads.items()}
    order = Cut.of(model, mx.zeros((1, 4), mx.int32), cross_entropy).trainable
    return to_tree({name: grads[name] for name in order})


def one_device(model, rows=4, m=2):
    return reference.value_and_grad(model, *batch(rows), m).grads


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_any_cut_backward_whole_or_in_parts_gives_the_gradients_of_one_device(recompute, split):
    model = tiny(4)
    for sizes in [(4,), (1, 3), (2, 1, 1)]:
        stages, works = stages_of(model, sizes, recompute), works_of()
        for work in works:
            buffers, _ = forward(stages, work)
            backward(stages, work, buffers, split)
        assert_bit_equal(grads_of(model, stages), one_device(model))


def test_gradients_are_added_in_ascending_order_though_the_backwards_come_in_another():
    model, works = tiny(2), works_of(rows=5, m=5)
    stages = stages_of(model, (2,))
    buffers = [forward(stages, work)[0] for work in works]
    for j in (3, 0, 4, 2, 1):
        backward(stages, works[j], buffers[j])
    assert_bit_equal(grads_of(model, stages), one_device(model, rows=5, m=5))


def test_without_recompute_each_layers_forward_runs_once_a_microbatch():
    model = tiny(4)
    for sizes, split in itertools.product([(4,), (1, 3), (2, 2)], [False, True]):
        stages, [work] = stages_of(model, sizes), works_of(m=1)
        buffers, forwards = forward(stages, work)
        assert forwards == 4
        assert backward(stages, work, buffers, split) == 0


@pytest.mark.parametrize("recompute", ["layer", "stage"])
def test_recompute_runs_each_layers_forward_twice(recompute):
    model = tiny(4)
    for sizes, split in itertools.product([(4,), (1, 3), (2, 2)], [False, True]):
        stages, [work] = stages_of(model, sizes, recompute), works_of(m=1)
        buffers, forwards = forward(stages, work)
        assert forwards == 4
        assert backward(stages, work, buffers, split) == 4


def test_layers_before_the_first_that_trains_are_not_run_again():
    model = tiny(4)
    model.freeze()
    model.layers[3].unfreeze()
    stages, [work] = stages_of(model, (4,), "stage"), works_of(m=1)
    buffers, forwards = forward(stages, work)
    assert forwards == 4
    assert backward(stages, work, buffers) == 1


def active_memory():
    gc.collect()
    return mx.get_active_memory()


def kept_memory(recompute):
    """Bytes that each of 3 forwards adds, and bytes beyond gradients that are left after all backwards."""
    model = tiny(4, hidden=64)
    [stage], works = stages_of(model, (4,), recompute), works_of(rows=96, m=3)
    for work in works:  # once for whatever is made once
        mx.eval(stage.forward(work, [], []))
        evaluated(stage.backward(work.index, []))
    grads = sum(grad.nbytes for grad in stage.grads.values())
    stage.begin_step()
    base, levels = active_memory(), []
    for work in works:
        mx.eval(stage.forward(work, [], []))
        levels.append(active_memory())
    for work in works:
        evaluated(stage.backward(work.index, []))
    added = [b - a for a, b in itertools.pairwise([base, *levels])]
    return added, active_memory() - base - grads


@pytest.mark.usefixtures("exact_memory")
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_the_residuals_memory_is_given_back_after_the_backward(recompute):
    added, left = kept_memory(recompute)
    assert min(added) > 0
    assert left < min(added) / 4


@pytest.mark.usefixtures("exact_memory")
def test_recompute_keeps_less():
    none, layer, stage = (min(kept_memory(recompute)[0]) for recompute in RECOMPUTE)
    assert none > 2 * layer
    assert layer > 2 * stage


def test_live_residuals_are_counted_from_the_forward_to_the_end_of_the_whole_backward():
    [stage], works = stages_of(tiny(1), (1,)), works_of(m=3)
    counts = []
    for work in works:
        stage.forward(work, [], [])
        counts.append(stage.num_live_residuals)
    evaluated(stage.backward(0, []))
    counts.append(stage.num_live_residuals)
    evaluated(stage.backward_input(1, []))
    counts.append(stage.num_live_residuals)
    evaluated(stage.backward_weights(1))
    counts.append(stage.num_live_residuals)
    assert counts == [1, 2, 3, 2, 2, 1]
    assert stage.max_live_residuals == 3


def test_an_evaluation_keeps_nothing():
    [stage], works = stages_of(tiny(2), (2,)), works_of()
    for work in works:
        stage.forward(work, [], [], keep=False)
    assert (stage.num_live_residuals, stage.max_live_residuals) == (0, 0)
    with pytest.raises(ScheduleError, match=r"\[stage 0\] The backward of microbatch 0 has no forward"):
        evaluated(stage.backward(0, []))


def test_a_forward_that_comes_twice_is_refused():
    [stage], [work, _] = stages_of(tiny(1), (1,)), works_of()
    stage.forward(work, [], [])
    with pytest.raises(ScheduleError, match=r"\[stage 0\] 0F0 came twice"):
        stage.forward(work, [], [])


def test_a_backward_without_a_forward_or_after_its_backward_is_refused():
    [stage], [work, _] = stages_of(tiny(1), (1,)), works_of()
    for part in (stage.backward, stage.backward_input):
        with pytest.raises(ScheduleError, match=r"\[stage 0\] The backward of microbatch 0 has no forward"):
            evaluated(part(0, []))
    stage.forward(work, [], [])
    evaluated(stage.backward(0, []))
    with pytest.raises(ScheduleError, match=r"came twice"):
        evaluated(stage.backward(0, []))


def test_a_weight_part_comes_after_its_input_part():
    [stage], [work, _] = stages_of(tiny(1), (1,)), works_of()
    stage.forward(work, [], [])
    with pytest.raises(ScheduleError, match=r"\[stage 0\] 0W0 came before its input part"):
        evaluated(stage.backward_weights(0))
    evaluated(stage.backward_input(0, []))
    with pytest.raises(ScheduleError, match=r"came twice"):
        evaluated(stage.backward_input(0, []))
    evaluated(stage.backward_weights(0))


def test_a_new_step_forgets_the_one_before():
    model = tiny(1)
    [stage], [work, other] = stages_of(model, (1,)), works_of()
    stage.forward(work, [], [])
    evaluated(stage.backward(0, []))
    stage.forward(other, [], [])
    stage.begin_step()
    assert not stage.grads
    assert not stage.losses
    assert (stage.num_live_residuals, stage.max_live_residuals) == (0, 0)


def test_the_first_stages_input_part_ends_at_the_embeddings_output():
    model = tiny(3)
    [stage], [work] = stages_of(model, (3,)), works_of(m=1)
    mx.eval(stage.forward(work, [], []))
    *_, flow = parts = list(stage.backward_input(0, []))
    assert [array.shape for array in flow] == [] or flow[0].shape == (4, 6, 8)
    shapes = [array.shape for arrays in parts for array in arrays]
    assert shapes == [(4, 6, 8)]
    # It is the gradient by what leaves the embedding: scattered over the tokens, it is the embedding's own.
    tokens = work.microbatch.inputs.reshape(-1)
    by_table = mx.zeros((23, 8)).at[tokens].add(parts[0][0].reshape(-1, 8))
    evaluated(stage.backward_weights(0))
    assert mx.allclose(by_table, stage.grads["embed.weight"], rtol=1e-6, atol=1e-7)


def test_the_input_part_runs_no_product_of_weights_gradients():
    """A layer's weight gradient and its input's are one product each: half of them are left for the weight part."""
    model = tiny(3)
    for name, expected in [("whole", 2 * 3 + 2), ("input", 3 + 1)]:
        [stage], [work] = stages_of(model, (3,)), works_of(m=1)
        mx.eval(stage.forward(work, [], []))
        parts = stage.backward(0, []) if name == "whole" else stage.backward_input(0, [])
        assert count_products(parts) == expected, name


def count_products(parts):
    import io

    total = 0
    for arrays in parts:
        picture = io.StringIO()
        mx.export_to_dot(picture, *arrays)
        total += picture.getvalue().count('label ="Matmul"')
        mx.eval(*arrays)
    return total


def test_input_cotangents_are_handed_out_once():
    model = tiny(2)
    stages, [work] = stages_of(model, (1, 1)), works_of(m=1)
    forward(stages, work)
    evaluated(stages[1].backward(0, []))
    assert stages[1].take_input_cotangents(0)[0].shape == (4, 6, 8)
    with pytest.raises(KeyError):
        stages[1].take_input_cotangents(0)


def test_what_trains_decides_who_has_a_backward_and_who_passes_a_cotangent():
    model = tiny(4)
    model.freeze()
    model.layers[1].unfreeze()
    first, second, third, fourth = stages_of(model, (1, 1, 1, 1))
    assert [s.trains for s in (first, second, third, fourth)] == [False, True, True, True]
    assert [s.passes_cotangent for s in (first, second, third, fourth)] == [False, False, True, True]
    assert [s.names for s in (first, third, fourth)] == [[], [], []]
    assert second.names == ["layers.1.linear.weight", "layers.1.linear.bias"]


def test_lora_in_the_middle_of_a_stage_leaves_what_is_below_out_of_the_backward():
    model = tiny(4)
    put_lora_on(model, num_layers=2)
    stages, works = stages_of(model, (3, 1)), works_of()
    assert [stage.passes_cotangent for stage in stages] == [False, True]
    for work in works:
        buffers, _ = forward(stages, work)
        backward(stages, work, buffers)
    assert_bit_equal(grads_of(model, stages), one_device(model))


def test_a_boundary_travels_in_the_models_own_dtype():
    stages, [work] = stages_of(tiny(2, dtype=mx.bfloat16), (1, 1)), works_of(m=1)
    assert stages[0].specs_out(work) == stages[1].specs_in(work) == (ArraySpec((4, 6, 8), mx.bfloat16),)
    [boundary] = stages[0].forward(work, [], [mx.zeros((4, 6, 8), mx.bfloat16)])
    assert ArraySpec.of(boundary) == stages[0].specs_out(work)[0]


def test_specs_follow_each_microbatchs_shape():
    stages, [large, small] = stages_of(tiny(2), (1, 1)), works_of(rows=3, m=2)
    assert stages[0].specs_out(large)[0].shape == (2, 6, 8)
    assert stages[0].specs_out(small)[0].shape == (1, 6, 8)


def test_what_the_model_does_with_a_shape_is_kept_for_a_few_shapes_only():
    shared = Cut.of(tiny(1), mx.zeros((1, 4), mx.int32), cross_entropy)
    for seq in range(1, 30):
        assert shared.look(mx.zeros((1, seq), mx.int32)).crossing(1) == (ArraySpec((1, seq, 8), mx.float32),)
    assert len(shared._looks) <= 8


def test_a_forward_leaves_the_parameters_as_they_are():
    model = tiny(2)
    before = copied(model.parameters())
    stages, [work] = stages_of(model, (1, 1)), works_of(m=1)
    buffers, _ = forward(stages, work)
    backward(stages, work, buffers)
    assert all(same_bits(before[name], after) for name, after in copied(model.parameters()).items())
