import gc

import mlx.core as mx
import mlx.nn as nn
import pytest
from tiny import is_lazy, leaves, llama, put_lora_on, tiny

from pptrain.graph import Parts, examine
from pptrain.microbatch import Microbatch, cross_entropy
from pptrain.model import ArraySpec
from pptrain.segment import Cut, Segment, Work
from pptrain.sizes import specs_back, specs_into

pytestmark = pytest.mark.usefixtures("exact_memory")

ROWS, SEQ = 2, 32
TOKENS = mx.zeros((ROWS, SEQ + 1), mx.int32)
LOSS = (ArraySpec((), mx.float32),)


def cut_of(model):
    return Cut.of(model, TOKENS[:, :-1], cross_entropy)


def ends(cut, sites):
    return specs_into(cut, sites.start, TOKENS), specs_back(cut, sites.stop, TOKENS)


def parts_of(model, sites):
    cut = cut_of(model)
    return examine(Segment(cut, sites), TOKENS, *ends(cut, sites))


def adapted(adapter, dtype=mx.float32):
    model = llama(4, hidden_size=64, intermediate_size=96, dtype=dtype)
    if adapter == "qlora":
        nn.quantize(model, group_size=32, bits=4)
    if adapter != "full":
        put_lora_on(model)
    return model


def kept_by_mlx(model, sites):
    """How much more memory is in use after the forward than before it, without the output."""
    cut = cut_of(model)
    into, outputs = ends(cut, sites)
    arrays = [[mx.ones(spec.shape, spec.dtype) for spec in specs] for specs in (into, outputs)]
    work = Work(Microbatch(TOKENS, mx.array([[1, SEQ]] * ROWS)), 0, mx.array(64.0), 0, 0)
    mx.eval(arrays, work.microbatch.tokens, work.microbatch.lengths, work.num_tokens)
    gc.collect()
    before = mx.get_active_memory()
    output, graph = Segment(cut, sites).differentiate(work, *arrays)
    mx.eval(output)
    kept = mx.get_active_memory() - before - sum(array.nbytes for array in output)
    assert graph.grads
    return kept


@pytest.mark.parametrize("adapter", ["full", "lora", "qlora"])
@pytest.mark.parametrize("sites", [range(2, 3), range(2, 4), range(3, 5), range(1, 5)], ids=str)
def test_the_residuals_read_from_the_graph_are_the_memory_that_mlx_keeps(adapter, sites):
    model = adapted(adapter)
    assert parts_of(model, sites).residual_bytes == pytest.approx(kept_by_mlx(model, sites), rel=0.005)


@pytest.mark.parametrize("adapter", ["full", "lora", "qlora"])
def test_in_bfloat16_an_uncompiled_graph_keeps_up_to_a_third_more_than_is_read(adapter):
    model = adapted(adapter, mx.bfloat16)
    found, kept = parts_of(model, range(2, 4)).residual_bytes, kept_by_mlx(model, range(2, 4))
    assert found <= kept <= 1.36 * found


def test_residuals_of_sites_add_up_to_those_of_a_stage_with_what_goes_from_one_to_the_next():
    model = adapted("lora")
    each = [parts_of(model, range(site, site + 1)).residual_bytes for site in (2, 3)]
    [between] = specs_into(cut_of(model), 3, TOKENS)
    assert sum(each) + between.nbytes == parts_of(model, range(2, 4)).residual_bytes


def test_the_three_parts_of_a_linear_layer_are_one_product_each():
    # [rows, seq, 8] times [8, 8]: 2 * 8 operations for each of rows * seq * 8 outputs.
    product = 2 * 8 * ROWS * SEQ * 8
    parts = parts_of(tiny(3, hidden=8), range(2, 3))
    assert (parts.forward_flops, parts.input_flops, parts.weight_flops) == (product, product, product)


def test_frozen_weights_have_no_weight_part_and_what_comes_before_all_that_trains_has_no_backward():
    model = tiny(3, hidden=8)
    model.freeze()
    model.layers[1].linear.unfreeze()
    product = 2 * 8 * ROWS * SEQ * 8
    before, trained, after = (parts_of(model, range(site, site + 1)) for site in (1, 2, 3))
    assert before == Parts(product, 0, 0, 0)
    assert (trained.input_flops, trained.weight_flops) == (0, product)
    assert (after.weight_flops, after.residual_bytes > 0) == (0, True)


def test_no_weight_is_read_and_nothing_is_computed():
    model = adapted("lora")
    model.update({"lm_head": {"weight": mx.random.normal((23, 64)) + 1}})
    parts_of(model, range(4, 5))
    assert is_lazy(leaves(model)["lm_head.weight"])
