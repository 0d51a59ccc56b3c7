import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from tiny import Layer, leaves, llama, put_lora_on, same_bits, tiny

from pptrain.errors import ModelError
from pptrain.model import (
    ArraySpec,
    find_layers,
    find_slots,
    has_dropout,
    intercepted,
    replaced,
    trainable_names,
    units_of,
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


def test_layers_may_stand_in_a_dict_or_a_sequential_and_must_be_modules():
    model, layers = nn.Module(), [Layer(8), Layer(8)]
    for stack in (layers, {"a": layers[0], "b": layers[1]}, nn.Sequential(*layers)):
        model.layers = stack
        assert [id(layer) for layer in find_layers(model)] == [id(layer) for layer in layers]
    model.layers = [layers[0], mx.tanh]
    with pytest.raises(ModelError, match=r"has a \S+ as layer 1\. Expected modules of mlx\.nn"):
        find_layers(model)


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


def test_calls_within_an_intercepted_call_are_its_own():
    model, seen = tiny(1), []

    def around(number, call, /, *args):
        seen.append(number)
        return call(*args)

    with intercepted([model.layers[0].linear, model.layers[0]], around):
        model(TOKENS)
    assert seen == [1]


def test_what_is_intercepted_is_the_layers_or_else_their_parts():
    model = tiny(2)
    model.layers.append(model.layers[0])
    whole, parts = units_of(model)
    assert [(unit.layer, unit.module) for unit in whole] == [(0, model.layers[0]), (1, model.layers[1])]
    assert {type(unit.module).__name__ for unit in parts} == {"Layer", "Linear", "Dropout"}
    assert not any(unit.is_whole for unit in parts)


def test_keys_that_match_no_module_of_any_layer_are_found():
    assert unmatched_keys(tiny(2).layers, ["linear", "liner", "dropout"]) == ["liner"]
