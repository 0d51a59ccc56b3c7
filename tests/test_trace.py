import itertools
import os

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import odd_models
import pytest
from odd_models import built
from tiny import Tiny, batch, leaves, llama, same_bits, tiny

from pptrain import Pipeline, reference
from pptrain.errors import ModelError
from pptrain.job import warn_of_order
from pptrain.lazy import mentions
from pptrain.microbatch import cross_entropy, cut
from pptrain.model import ArraySpec
from pptrain.segment import Cut
from pptrain.trace import count_layers, trace

TOKENS = mx.zeros((2, 5), mx.int32)
HIDDEN = ArraySpec((2, 5, 8), mx.float32)


def test_a_trace_shows_what_enters_each_layer_and_who_reads_what():
    found = trace(tiny(2, dtype=mx.bfloat16), TOKENS)
    assert found.boundaries == ((ArraySpec((2, 5, 8), mx.bfloat16),),) * 2
    assert found.uses == (
        {"embed.weight"},
        {"layers.0.linear.weight", "layers.0.linear.bias"},
        {"layers.1.linear.weight", "layers.1.linear.bias", "norm.weight", "head.weight"},
    )


def test_a_layer_whose_hidden_state_is_a_keyword_is_traced_too():
    class ByKeyword(Tiny):
        def __call__(self, tokens):
            hidden = self.embed(tokens)
            for layer in self.layers:
                hidden = layer(hidden=hidden)
            return self.head(hidden)

    assert trace(ByKeyword(2), TOKENS).boundaries == ((HIDDEN,),) * 2


def test_a_tied_embedding_is_read_first_and_last():
    uses = trace(llama(3, tie_word_embeddings=True), TOKENS).uses
    assert ["model.embed_tokens.weight" in names for names in uses] == [True, False, False, True]


def test_masks_are_made_from_the_tokens_again_and_do_not_cross():
    assert [len(specs) for specs in trace(llama(3), TOKENS).boundaries] == [1, 1, 1]


def test_what_a_later_layer_reads_crosses_every_cut_in_between():
    found = trace(built(odd_models.ReadsTwoBefore), TOKENS)
    assert [len(specs) for specs in found.boundaries] == [1, 1, 2, 2]


def test_values_of_every_kind_cross_and_floating_ones_have_a_gradient():
    model = built(odd_models.Everything, 3)
    found = trace(model, TOKENS)
    gradients = found.with_gradient(leaves(model.trainable_parameters()))
    crossing = [[(found.values[v].spec.dtype, v in gradients) for v in found.crossing(site)] for site in (2, 3)]
    # The newest first: what the dict was given by the first layer, the integers, the hidden state, the embedding.
    assert sorted(map(str, crossing[0])) == sorted(map(str, crossing[1]))
    assert sorted(str(dtype) for dtype, _ in crossing[0]) == sorted(map(str, [mx.float32] * 3 + [mx.uint32]))
    assert all(has_gradient == (dtype == mx.float32) for dtype, has_gradient in crossing[0])


def test_values_that_depend_on_nothing_that_trains_have_no_gradient():
    model = built(odd_models.TwoStreams)
    found = trace(model, TOKENS)
    assert len(found.with_gradient(["head.weight"])) == 0
    assert len(found.with_gradient(["layers.3.down.weight"])) == 1


def test_a_stack_that_is_run_twice_has_twice_the_layers_to_cut():
    model = built(odd_models.Looped, 3)
    assert count_layers(model) == trace(model, TOKENS).num_positions == 6
    assert count_layers(tiny(3)) == 3
    assert count_layers(built(odd_models.ByParts, 3)) == 3


def test_the_same_layer_twice_is_two_layers_to_cut():
    model = tiny(2)
    model.layers[1] = model.layers[0]
    assert [call.layer for call in trace(model, TOKENS).calls] == [0, 0]


def test_boundaries_follow_the_shape_of_the_tokens():
    assert trace(tiny(2), mx.zeros((3, 9), mx.int32)).boundaries == ((ArraySpec((3, 9, 8), mx.float32),),) * 2


def test_a_trace_reads_no_weight(tmp_path):
    path = str(tmp_path / "weights.safetensors")
    model = tiny(2)
    model.save_weights(path)
    model.load_weights(path)
    os.truncate(path, 100)  # whoever reads a weight from here on fails
    assert len(trace(model, TOKENS).uses) == 3
    with pytest.raises(RuntimeError):
        mx.eval(model.parameters())


def test_mentions_are_the_leaves_that_an_array_is_computed_from_and_who_reads_them_in_the_order_of_the_graph():
    a, b, c = mx.array([1.0]), mx.array([2.0]), mx.array([3.0])
    is_leaf, found = mentions((c * a + 1) * c, {"x.a": a, "x.b": b, "x.c": c})
    assert (is_leaf, [name for name, _ in found]) == (False, ["x.c", "x.a", "x.c", "x.a", "x.c"])
    first, second, *reads = [operation for _, operation in found]
    assert (first, second) == ("", "")
    assert reads[0] == reads[1] != reads[2]


def test_an_array_that_is_a_leaf_by_another_handle_is_told():
    a = mx.zeros((2,)) + 1
    assert mentions(a.astype(a.dtype), {"a": a}) == (True, [("a", "")])
    assert mentions(mx.array([1.0]), {"a": a}) == (False, [])


# -- cut ---------------------------------------------------------------------------------------------------------------


def cuts(num_layers, num_stages):
    for ends in itertools.combinations(range(1, num_layers), num_stages - 1):
        yield [b - a for a, b in itertools.pairwise([0, *ends, num_layers])]


def differing(model, result, one):
    ours, theirs = leaves(result.grads), leaves(one.grads)
    assert list(ours) == list(theirs)
    return {name for name in theirs if not same_bits(ours[name], theirs[name])}


SHARED = {
    "SharedBlock": ("shared.",),
    "UsedTwice": ("shared.",),
    "Looped": ("layers.", "norm."),
    "Mixed": ("mixer.",),
    "Nested": ("embed.", "norm.", "stacks.0.norm."),
}
"""Parameters that two stages may share: their sums are in another order."""


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("kind", odd_models.CUTTABLE, ids=lambda kind: kind.__name__)
def test_every_cut_of_every_boundary_gives_the_gradients_of_one_device(kind, schedule):
    model = built(kind)
    one = reference.value_and_grad(model, *batch(5), 3)
    total = count_layers(model)
    for layers in [*cuts(total, 2), *cuts(total, 3)]:
        recompute = "layer" if len(layers) == 3 else "none"
        pipeline = Pipeline(model, len(layers), layers=layers, schedule=schedule, recompute=recompute)
        result = pipeline.value_and_grad(*batch(5), 3)
        assert same_bits(result.loss, one.loss)
        others = {name for name in differing(model, result, one) if not name.startswith(SHARED.get(kind.__name__, ()))}
        assert others == set(), (kind.__name__, layers)


@pytest.mark.parametrize("kind", odd_models.CUTTABLE, ids=lambda kind: kind.__name__)
def test_a_parameter_that_stages_share_is_within_its_bound(kind):
    model = built(kind)
    one = reference.value_and_grad(model, *batch(5), 3)
    result = Pipeline(model, 3).value_and_grad(*batch(5), 3)
    for name in differing(model, result, one):
        mine, its = leaves(result.grads)[name], leaves(one.grads)[name]
        assert mx.abs(mine - its).max().item() <= 1e-6 * mx.abs(its).max().item() * 3, name


@pytest.mark.parametrize("recompute", ["none", "layer", "stage"])
@pytest.mark.parametrize(
    "kind", [*odd_models.CUTTABLE, odd_models.InTurn, odd_models.Between], ids=lambda kind: kind.__name__
)
def test_in_one_stage_every_gradient_is_one_devices_whatever_is_recomputed(kind, recompute):
    model = built(kind)
    one = reference.value_and_grad(model, *batch(5), 3)
    for schedule in ("1f1b", "zb-h1"):
        result = Pipeline(model, 1, schedule=schedule, recompute=recompute).value_and_grad(*batch(5), 3)
        assert differing(model, result, one) == set()


def test_what_layers_read_of_their_own_with_longer_tokens_only_has_the_gradients_of_one_device():
    model, long = built(odd_models.Longer), batch(5, 12)
    assert "layers.2.long.weight" in trace(model, TOKENS).uses[3] - trace(model, TOKENS).reads[3]
    one = reference.value_and_grad(model, *long, 3)
    assert leaves(one.grads)["layers.2.long.weight"].any().item()
    for layers, recompute in itertools.product([(4,), (2, 2), (1, 2, 1)], ["none", "layer"]):
        pipeline = Pipeline(model, layers=layers, recompute=recompute)
        pipeline.value_and_grad(*batch(5), 3)
        assert differing(model, pipeline.value_and_grad(*long, 3), one) == set()
        assert "layers.3.long.weight" in pipeline.updated_by(len(layers) - 1)


@pytest.mark.parametrize(
    ("kind", "said"),
    [(odd_models.LongerHead, r"layer 3, or what follows it, reads long.weight"), (odd_models.LongerStack, "8 times")],
)
def test_longer_tokens_that_run_or_read_what_nobody_settled_are_refused(kind, said):
    model = built(kind)
    pipeline = Pipeline(model, 2)
    pipeline.value_and_grad(*batch(5), 3)
    with pytest.raises(ModelError, match=said):
        pipeline.value_and_grad(*batch(5, 12), 3)


def test_longer_tokens_may_read_what_does_not_train():
    model = built(odd_models.LongerHead)
    model.long.freeze()
    one = reference.value_and_grad(model, *batch(5, 12), 3)
    assert differing(model, Pipeline(model, 2).value_and_grad(*batch(5, 12), 3), one) == set()


@pytest.mark.parametrize("is_evaluated_first", [True, False])
def test_a_forward_that_goes_another_way_in_evaluation_is_looked_at_in_both_modes(is_evaluated_first):
    model, pipeline = built(odd_models.TwoModes), Pipeline(built(odd_models.TwoModes), 3)
    if is_evaluated_first:
        pipeline.loss_sum(cut(*batch(5), 3))
    result = pipeline.value_and_grad(*batch(5), 3)
    assert differing(model, result, reference.value_and_grad(model, *batch(5), 3)) == set()
    assert pipeline.loss_sum(cut(*batch(5), 3)) == reference.loss_sum(model, cut(*batch(5), 3)).item()
    # What an evaluation does not read stays with the rank that trains it.
    assert [rank for rank in range(3) if "scale" in pipeline.updated_by(rank)] == [2]


def test_in_evaluation_layers_may_keep_what_they_make_of_their_weights():
    model, optimizer = built(odd_models.Caching), optim.Adam(1e-2)
    pipeline = Pipeline(model, 3)
    for step in range(3):
        rows = batch(5, 4 + step)
        one = reference.value_and_grad(model, *rows, 3)
        assert differing(model, pipeline.value_and_grad(*rows, 3), one) == set()
        pipeline.step(optimizer, *rows, 3)
        assert pipeline.loss_sum(cut(*rows, 3)) == reference.loss_sum(model, cut(*rows, 3)).item()
    model.eval()
    with pytest.raises(ModelError, match=r"layer 0 \(CachingLayer\) changes its own `_scale`"):
        pipeline.step(optimizer, *batch(5), 3)


def test_a_dropout_between_layers_draws_where_it_is_called_also_after_an_evaluation():
    model = built(odd_models.DropsLate)
    one = reference.value_and_grad(model, *batch(5), 3)
    pipeline = Pipeline(model, layers=(1, 2, 1))
    pipeline.loss_sum(cut(*batch(5), 3))
    result = pipeline.value_and_grad(*batch(5), 3)
    assert same_bits(result.loss, one.loss)
    assert differing(model, result, one) == set()


def test_a_trace_shows_in_which_order_one_device_adds_and_which_cuts_change_it():
    found = trace(built(odd_models.InTurn), TOKENS)
    (side,) = set(found.crossing(2)) & set(found.crossing(4))
    assert found.readers[side] == [4, 4, 3, 2, 1, 4]  # behind the stack, the last layer's, ..., behind the stack
    assert [found.out_of_order(site) for site in range(1, 5)] == [[], [side], [side], [side]]
    assert trace(built(odd_models.FromEmbedding), TOKENS).out_of_order(1) == [0]


@pytest.mark.parametrize("kind", odd_models.MENDED, ids=lambda kind: kind.__name__)
def test_what_a_module_makes_between_layers_crosses_cuts(kind):
    found = trace(built(kind), TOKENS)
    assert found.made_between == []
    assert [found.out_of_order(site) for site in range(2, 5)] == [[]] * 3
    assert {call.layer for call in found.calls} == {None, 0, 1, 2, 3}


def test_what_a_module_makes_between_layers_belongs_to_the_site_that_calls_it():
    found = trace(built(odd_models.EncoderDecoder), TOKENS)
    assert [{name for name in names if not name.startswith("layers.")} for names in found.uses] == [
        {"embed.weight"},
        set(),
        {"between.weight", "start.weight"},
        set(),
        {"norm.weight", "head.weight"},
    ]
    # The decoder's hidden state and the encoder's output, normalised; of the last decoder layer there is one alone.
    assert [len(specs) for specs in found.boundaries] == [1, 1, 2, 1]


def test_modules_between_layers_are_looked_at_only_where_a_cut_needs_it():
    for model in (tiny(2), llama(2), built(odd_models.SharedBlock), built(odd_models.FromEmbedding)):
        assert all(call.layer is not None for call in trace(model, TOKENS).calls)


def test_a_module_that_calls_layers_which_it_does_not_hold_hides_none():
    class Caller(nn.Module):
        def __init__(self, layers):
            super().__init__()
            object.__setattr__(self, "held", lambda: layers)

        def __call__(self, hidden):
            for layer in self.held():
                hidden = layer(hidden)
            return hidden

    class Called(odd_models.MixedIn):
        def __init__(self, num_layers=4, **options):
            super().__init__(num_layers, **options)
            self.caller = Caller(self.layers[:2])

        def __call__(self, tokens):
            first = self.embed_norm(self.embed(tokens))
            hidden = self.caller(0.5 * first)
            for layer in self.layers[2:]:
                hidden = layer(hidden + 0.1 * first)
            return self.head(self.norm(hidden))

    model = built(Called)
    found = trace(model, TOKENS)
    assert (found.num_positions, count_layers(model)) == (4, 4)
    assert found.made_between != []
    assert found.out_of_order(3) == ["embed.weight", "embed_norm.weight"]


def test_what_operations_make_between_layers_and_both_sides_of_a_cut_use_is_made_twice():
    found = trace(built(odd_models.Between), TOKENS)
    (embedded,) = set(found.crossing(2)) & set(found.crossing(4))
    assert [found.out_of_order(site) for site in range(1, 5)] == [[], [embedded], [embedded], [embedded]]
    model = built(odd_models.Between)
    pipeline = Pipeline(model, layers=(2, 2), recompute="layer")
    assert (pipeline.reordered, pipeline.shared_names) == ([2], set())
    one = reference.value_and_grad(model, *batch(5), 3)
    assert differing(model, pipeline.value_and_grad(*batch(5), 3), one) <= {"embed.weight"}


def test_a_cut_that_changes_the_order_of_adding_is_told(caplog):
    model = built(odd_models.InTurn)
    pipeline = Pipeline(model, layers=(2, 2), recompute="layer")
    assert pipeline.reordered == [2]
    one = reference.value_and_grad(model, *batch(5), 3)
    for name in differing(model, pipeline.value_and_grad(*batch(5), 3), one):
        assert name.startswith(("embed.", "layers.0.")), name  # nothing from the cut on
    warn_of_order(pipeline)
    assert "The cut before layer 2 adds gradients in another order than one device" in caplog.text
    caplog.clear()
    in_order = Pipeline(built(odd_models.ReadsTwoBefore), layers=(2, 2))
    warn_of_order(in_order)
    assert (in_order.reordered, caplog.text) == ([], "")


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (odd_models.Counting, r"layer 1 \(CountingLayer\) changes its own `num_calls` at every call"),
        (odd_models.Remembering, r"layer 1 \(RememberingLayer\) changes its own `_before` at every call"),
        (odd_models.Borrowing, r"layer 2 reads layers\.0\.linear\.weight, which is layer 0's, in another stage"),
        (odd_models.Choosing, r"layer 1 evaluates arrays in its forward"),
        (odd_models.Overwriting, r"layer 1 changes its input in place"),
        (odd_models.Averaging, r"computes `layers\.1\.batch_norm\.running_mean` from the data and keeps it"),
        (odd_models.Turning, r"with tokens of shape \(2, \d+\) layer 0, or what follows it, reads layers\.3\."),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_layers_that_a_cut_would_break_are_refused(kind, message):
    with pytest.raises(ModelError, match=message):
        Pipeline(built(kind), 2).value_and_grad(*batch(4), 2)


@pytest.mark.parametrize(
    ("kind", "reader"),
    [
        (odd_models.Aside, "what comes after the layers"),
        (odd_models.Noted, "what comes after the layers"),
        (odd_models.Sharing, "layer 2"),
        (odd_models.Postponing, "layer 1"),
        (odd_models.Iterating, "its forward"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("layers", [(4,), (1, 3), (3, 1)], ids=str)
def test_what_layers_hand_on_unseen_is_refused(kind, reader, layers):
    message = f"cannot be cut: {reader} reads what a layer has made and not handed on"
    with pytest.raises(ModelError, match=message):
        Pipeline(built(kind), layers=layers).value_and_grad(*batch(4), 2)


@pytest.mark.parametrize(("reader", "owner"), [(2, 0), (0, 2)])
def test_the_layers_that_belong_together_are_named_in_their_order(reader, owner):
    model = built(Tiny)
    model.layers[reader] = odd_models.BorrowingLayer(8, model.layers[owner])
    with pytest.raises(ModelError, match=f"layer {reader} reads .*layer {owner}'s.* layers 0 to 2 in one stage"):
        Pipeline(model, layers=(1, 3)).value_and_grad(*batch(4), 2)


def test_a_layer_may_read_another_layers_weights_within_a_stage():
    model = built(odd_models.Borrowing)
    one = reference.value_and_grad(model, *batch(4), 2)
    result = Pipeline(model, layers=(3, 1)).value_and_grad(*batch(4), 2)
    assert differing(model, result, one) == set()


def test_a_model_that_calls_none_of_its_layers_is_refused():
    class Idle(Tiny):
        def __call__(self, tokens):
            return self.head(self.embed(tokens))

    with pytest.raises(ModelError, match="none of its layers is called"):
        trace(Idle(2), TOKENS)


def test_a_forward_that_draws_is_not_compiled_and_that_is_seen_and_not_asked_of_its_modules():
    class Noisy(Tiny):
        def __call__(self, tokens):
            logits = super().__call__(tokens)
            return logits + mx.random.normal(logits.shape)

    cuts_of = [
        Cut.of(built(kind, **more), TOKENS, cross_entropy, compile=True)
        for kind, more in [(Tiny, {}), (Tiny, {"dropout": 0.2}), (Noisy, {})]
    ]
    assert [cut.compile for cut in cuts_of] == [True, False, False]
