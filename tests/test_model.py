import os

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from tiny import Layer, Tiny, leaves, llama, put_lora_on, same_bits, tiny

from pptrain.errors import ModelError
from pptrain.model import (
    ArraySpec,
    boundaries,
    find_layers,
    find_slots,
    has_dropout,
    intercepted,
    reachable,
    replaced,
    trace,
    trainable_names,
    unmatched_keys,
)

TOKENS = mx.zeros((2, 5), mx.int32)


def plus_one(layer, call, hidden):
    return call(hidden) + 1


def test_the_spec_of_an_array_has_its_size():
    assert ArraySpec((2, 3), mx.bfloat16).nbytes == 12
    assert ArraySpec.of(mx.zeros((4, 0), mx.float32)) == ArraySpec((4, 0), mx.float32)


def test_a_model_without_layers_is_refused():
    with pytest.raises(ModelError, match=r"linear\.Linear has no `layers`"):
        find_layers(nn.Linear(2, 2))


def test_every_parameter_has_a_slot_that_reads_and_replaces_it():
    model = llama(2)
    put_lora_on(model)
    slots = find_slots(model)
    assert list(slots) == [name for name, _ in tree_flatten(model.parameters())]
    for name, slot in slots.items():
        slot.put(mx.full(slot.array.shape, 7.0))
        assert leaves(model.parameters())[name] is slot.array


def test_trainable_names_stand_in_the_models_tree_order():
    model = tiny(3)
    model.freeze()
    model.layers[2].unfreeze()
    model.embed.unfreeze()
    assert trainable_names(model) == ("embed.weight", "layers.2.linear.weight", "layers.2.linear.bias")


def test_dropout_counts_only_while_training_and_only_above_zero():
    assert has_dropout(tiny(1, dropout=0.5))
    assert not has_dropout(tiny(1, dropout=0.0))
    assert not has_dropout(tiny(1, dropout=0.5).eval())


def test_replaced_parameters_come_back_after_an_exception():
    model = tiny(1)
    slot, before = find_slots(model)["norm.weight"], model.norm.weight

    def fails():
        with replaced([slot], [mx.zeros(8)]):
            assert not model.norm.weight.any()
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert model.norm.weight is before


def test_an_interception_stands_in_for_every_call_of_a_layer_and_ends():
    model = tiny(3)
    plain = model(TOKENS)
    with intercepted(model.layers, plus_one):
        assert isinstance(model.layers[0], Layer)
        assert not mx.array_equal(model(TOKENS), plain)
    assert same_bits(model(TOKENS), plain)
    assert [type(layer) for layer in model.layers] == [Layer] * 3


def test_layers_get_their_own_class_back_after_an_exception():
    model = tiny(2)

    def fails(layer, call, hidden):
        raise KeyError

    with pytest.raises(KeyError), intercepted(model.layers, fails):
        model(TOKENS)
    assert [type(layer) for layer in model.layers] == [Layer] * 2


def test_interceptions_nest():
    model = tiny(2)
    seen = []

    def outer(layer, call, hidden):
        seen.append(("outer", layer))
        return call(hidden)

    def inner(layer, call, hidden):
        seen.append(("inner", layer))
        return call(hidden)

    with intercepted(model.layers, outer), intercepted(model.layers, inner):
        model(TOKENS)
    assert seen == [("inner", 0), ("outer", 0), ("inner", 1), ("outer", 1)]
    assert type(model.layers[0]) is Layer


def test_a_layer_whose_hidden_state_is_a_keyword_is_intercepted_too():
    class ByKeyword(Tiny):
        def __call__(self, tokens):
            hidden = self.embed(tokens)
            for layer in self.layers:
                hidden = layer(hidden=hidden)
            return self.head(hidden)

    model = ByKeyword(2)
    assert trace(model, TOKENS).boundaries == (((ArraySpec((2, 5, 8), mx.float32),)),) * 2
    with intercepted(model.layers, lambda layer, call, hidden: hidden * 0):
        assert not model(TOKENS).any()


def test_a_trace_shows_what_enters_each_layer_and_who_reads_what():
    model = tiny(2, dtype=mx.bfloat16)
    found = trace(model, TOKENS)
    assert found.boundaries == ((ArraySpec((2, 5, 8), mx.bfloat16),),) * 2
    assert found.uses == (
        {"embed.weight"},
        {"layers.0.linear.weight", "layers.0.linear.bias"},
        {"layers.1.linear.weight", "layers.1.linear.bias", "norm.weight", "head.weight"},
    )


def test_a_tied_embedding_is_read_first_and_last():
    uses = trace(llama(3, tie_word_embeddings=True), TOKENS).uses
    assert ["model.embed_tokens.weight" in names for names in uses] == [True, False, False, True]


def test_a_layer_that_is_the_same_object_twice_is_refused():
    model = tiny(2)
    model.layers[1] = model.layers[0]
    with pytest.raises(ModelError, match=r"layer 1 came where layer 0 was expected"):
        trace(model, TOKENS)


class Backwards(Tiny):
    def __call__(self, tokens):
        hidden = self.embed(tokens)
        for layer in reversed(self.layers):
            hidden = layer(hidden)
        return self.head(hidden)


class Twice(Tiny):
    def __call__(self, tokens):
        hidden = self.embed(tokens)
        for layer in [*self.layers, *self.layers]:
            hidden = layer(hidden)
        return self.head(hidden)


class Skips(Tiny):
    def __call__(self, tokens):
        return self.head(self.layers[0](self.embed(tokens)))


class TakesAPair(Layer):
    def __call__(self, pair):
        return (super().__call__(pair[0]), None)


@pytest.mark.parametrize("kind", [Backwards, Twice, Skips])
def test_layers_that_are_not_called_once_each_in_order_are_refused(kind):
    with pytest.raises(ModelError, match=r"cannot be cut: layer \d came where layer \d was expected"):
        trace(kind(2), TOKENS)


def test_layers_that_hand_on_more_than_one_array_are_refused():
    class Paired(Tiny):
        def __call__(self, tokens):
            pair = (self.embed(tokens), None)
            for layer in self.layers:
                pair = layer(pair)
            return self.head(pair[0])

    model = Paired(2)
    model.layers = [TakesAPair(8), TakesAPair(8)]
    with pytest.raises(ModelError, match=r"layer 0 .* with tuple as its hidden state.*mlx_lm\.lora"):
        trace(model, TOKENS)


def test_boundaries_follow_the_shape_of_the_tokens():
    assert boundaries(tiny(2), mx.zeros((3, 9), mx.int32)) == ((ArraySpec((3, 9, 8), mx.float32),),) * 2


def test_a_trace_reads_no_weight(tmp_path):
    path = str(tmp_path / "weights.safetensors")
    model = tiny(2)
    model.save_weights(path)
    model.load_weights(path)
    os.truncate(path, 100)  # whoever reads a weight from here on fails
    assert len(trace(model, TOKENS).uses) == 3
    with pytest.raises(RuntimeError):
        mx.eval(model.parameters())


def test_reachable_names_the_leaves_that_an_array_is_computed_from():
    a, b, c = mx.array([1.0]), mx.array([2.0]), mx.array([3.0])
    assert reachable(a * c + 1, {"x.a": a, "x.b": b, "x.c": c}) == {"x.a", "x.c"}


def test_keys_that_match_no_module_of_any_layer_are_found():
    assert unmatched_keys(tiny(2).layers, ["linear", "liner", "dropout"]) == ["liner"]
