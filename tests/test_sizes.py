import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten
from tiny import batch, leaves, llama, put_lora_on, tiny

from pptrain import Pipeline
from pptrain.microbatch import cross_entropy
from pptrain.segment import Cut
from pptrain.sizes import Held, measure, optimizer_bytes

ADAM = optim.Adam(1e-3)


def sizes_of(model, rows=2, seq=6, optimizer=ADAM):
    return measure(Cut.of(model, mx.zeros((1, 8), mx.int32), cross_entropy), rows, seq, optimizer)


def all_sites(sizes):
    return range(len(sizes.sites))


def test_the_weights_of_all_sites_are_the_models():
    model = llama(3)
    sizes = sizes_of(model)
    assert sizes.held([all_sites(sizes)]).weights == sum(array.nbytes for array in leaves(model.parameters()).values())
    assert sizes.num_layers == 3


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adafactor", "Muon"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_an_optimizer_keeps_what_it_is_said_to_keep(name, dtype):
    model, optimizer = tiny(2, dtype=dtype), getattr(optim, name)(learning_rate=1e-3)
    said = sum(optimizer_bytes(optimizer, array) for array in leaves(model.trainable_parameters()).values())
    Pipeline(model, 2).step(optimizer, *batch(), 2)
    kept = {n: a for n, a in tree_flatten(optimizer.state) if n not in ("step", "learning_rate")}
    assert said == sum(array.nbytes for array in kept.values())


def test_gradients_are_float32_of_what_trains_and_nothing_else():
    model = llama(3, dtype=mx.bfloat16)
    put_lora_on(model)
    trained = sum(array.size for array in leaves(model.trainable_parameters()).values())
    sizes = sizes_of(model)
    assert sizes.held([all_sites(sizes)]).gradients == 4 * trained


def test_a_tied_embedding_is_held_once_by_each_rank_that_reads_it():
    sizes = sizes_of(tiny(4, tied=True))
    table = 23 * 8 * 4
    alone = sizes.held([range(0, 5)]).weights
    apart = sizes.held([range(0, 3)]).weights + sizes.held([range(3, 5)]).weights
    assert apart == alone + table
    assert sizes.held([range(0, 2), range(4, 5)]).weights + sizes.held([range(2, 4)]).weights == alone


def test_boundaries_are_what_comes_in_and_what_is_given_back():
    sizes, hidden = sizes_of(tiny(4), rows=2, seq=6), 2 * 6 * 8 * 4
    assert [sizes.boundary_bytes(r) for r in (range(0, 2), range(2, 4), range(4, 5))] == [hidden, 2 * hidden, hidden]


def test_recompute_keeps_inputs_of_layers_or_none_and_works_with_more():
    sizes, hidden = sizes_of(tiny(4), rows=2, seq=6), 2 * 6 * 8 * 4
    stage = range(2, 5)
    assert sizes.residual_bytes(stage, "layer") == 2 * hidden
    assert sizes.residual_bytes(stage, "stage") == 0
    assert sizes.residual_bytes(range(0, 3), "stage") == hidden  # what leaves the embedding
    assert sizes.residual_bytes(stage, "none") > 2 * hidden
    working = [sizes.working_bytes(stage, recompute) for recompute in ("none", "layer", "stage")]
    assert working == sorted(set(working))


def test_what_comes_before_all_that_trains_keeps_nothing():
    model = tiny(4)
    model.freeze()
    model.layers[2].unfreeze()
    sizes = sizes_of(model)
    assert [sizes.residual_bytes(range(0, 3), mode) for mode in ("none", "layer", "stage")] == [0, 0, 0]
    assert sizes.held([range(0, 3)]).gradients == 0


def test_experts_with_adapters_are_looked_at_though_mlx_cannot_export_their_gradients():
    from mlx_lm.models import qwen3_moe

    config = {
        "model_type": "qwen3_moe",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "rms_norm_eps": 1e-6,
        "vocab_size": 32,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
        "max_position_embeddings": 64,
        "norm_topk_prob": True,
    }
    model = qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(config))
    nn.quantize(model, group_size=32, bits=4)
    put_lora_on(model)
    # 64 choices of experts and more are sorted.
    few, many = (sizes_of(model, rows=1, seq=seq).sites[2].parts for seq in (16, 64))
    assert few.weight_flops > 0
    assert many.weight_flops == pytest.approx(4 * few.weight_flops, rel=0.05)
    assert many.residual_bytes > few.residual_bytes


def test_bytes_add_up():
    assert Held(1, 2, 3) + Held(10, 20, 30) == Held(11, 22, 33)
    assert Held(1, 2, 3).total == 6
