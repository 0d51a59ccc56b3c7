"""The pipeline as a user holds it. That any cut is one device is for `property_tests/test_pipeline.py`."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from listening import Listening
from mlx_lm import load
from mlx_lm.tuner.utils import linear_to_lora_layers
from tiny import Tiny, assert_bit_equal, batch, copied, is_lazy, leaves, put_lora_on, same_bits, tiny

from pptrain import Pipeline, reference
from pptrain.errors import ConfigError, ModelError, NonFiniteError, PartitionError
from pptrain.microbatch import cross_entropy, cut
from pptrain.optimizer import to_tree
from pptrain.schedule import gpipe
from transports import LoopbackWorld, TransportClosed, TransportSetupError

M = 2


def check(pipeline, *, step=0, **options):
    """Loss and gradients are the reference's for the model as it is now."""
    result = pipeline.value_and_grad(*batch(), M, step=step)
    one = reference.value_and_grad(pipeline.model, *batch(), M, step=step, **options)
    assert_bit_equal(result.grads, one.grads)
    assert same_bits(result.loss, one.loss)
    return result


def state_of(model, optimizer):
    return copied({"model": model.parameters(), "optimizer": optimizer.state})


# -- what can be asked for ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"num_stages": 4}, PartitionError, r"Cannot divide 3 layers into 4 stages"),
        ({"num_stages": 0}, PartitionError, r"0 stages were asked for"),
        ({"layers": (2, 2)}, PartitionError, r"2,2 covers 4 layers .* the model has 3 layers"),
        ({"layers": (3, 0)}, PartitionError, r"3,0 covers 3 layers with 0 in its smallest stage"),
        ({"layers": (1, 2), "num_stages": 3}, PartitionError, r"1,2 lists 2 stages, but 3 stages were asked for"),
        ({"schedule": "gpip"}, ConfigError, r"Unknown schedule 'gpip'.*Did you mean gpipe"),
        ({"recompute": "layers"}, ConfigError, r"\[recompute\] Unknown 'layers'\. Expected one of none, layer, stage"),
        ({"transport": "tcp"}, TransportSetupError, r"There is no transport 'tcp'"),
        ({"num_stages": 2, "transport": LoopbackWorld(3)}, ConfigError, r"2 stages .* the transport has 3 ranks"),
        ({"layers": (1, 2), "transport": LoopbackWorld(3)}, ConfigError, r"2 stages .* the transport has 3 ranks"),
    ],
)
def test_what_cannot_be_done_is_refused_at_once_with_the_values(options, kind, said):
    with pytest.raises(kind, match=said):
        Pipeline(tiny(3), **options)


def test_a_model_without_layers_is_refused():
    with pytest.raises(ModelError, match=r"Linear has no `layers`"):
        Pipeline(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (4,)),
        ({"num_stages": 3}, (1, 2, 1)),
        ({"layers": (3, 1)}, (3, 1)),
        ({"layers": [1, 3], "num_stages": 2}, (1, 3)),
        ({"transport": LoopbackWorld(2)}, (2, 2)),
    ],
)
def test_the_number_of_stages_comes_from_what_is_given(options, expected):
    pipeline = Pipeline(tiny(4), **options)
    assert pipeline.layers == expected
    assert (pipeline.num_ranks, pipeline.world.world_size) == (len(expected), len(expected))


def test_a_schedule_may_be_a_function():
    pipeline = Pipeline(tiny(2), 2, schedule=gpipe)
    check(pipeline)
    assert [str(span.action) for span in pipeline.spans[0]] == ["0F0", "0F1", "0B0", "0B1"]


# -- what it looks at --------------------------------------------------------------------------------------------------


def test_lora_put_on_after_the_pipeline_was_made_and_used_is_seen():
    model = tiny(3)
    pipeline = Pipeline(model, 3)
    check(pipeline)
    put_lora_on(model)
    assert all("lora" in name for name in leaves(check(pipeline).grads))


def test_a_layer_that_was_put_in_anothers_place_is_seen():
    model = tiny(2)
    pipeline = Pipeline(model, 2)
    first = check(pipeline)
    model.layers[1] = tiny(2, seed=5).layers[0]
    assert check(pipeline).loss.item() != first.loss.item()


def test_another_dtype_is_seen_and_travels_in_it():
    model = tiny(2)
    pipeline = Pipeline(model, 2)
    check(pipeline)
    model.set_dtype(mx.bfloat16)
    check(pipeline)


def test_a_users_loss_is_used():
    def squared(logits, targets):
        return (logits.sum(-1) - targets) ** 2

    for num_stages in (1, 2):
        check(Pipeline(tiny(2), num_stages, loss=squared), loss=squared)


class WithSpare(Tiny):
    """A model with a trainable parameter that its forward never reads."""

    def __init__(self):
        super().__init__(3)
        self.spare = mx.ones((2, 3), mx.bfloat16)


def test_a_trainable_parameter_that_nothing_uses_has_zeros_as_one_device_gives():
    spare = check(Pipeline(WithSpare(), 3)).grads["spare"]
    assert same_bits(spare, mx.zeros((2, 3)))


@pytest.mark.parametrize(
    ("num_ranks", "schedule", "each"), [(1, "interleaved", 2), (2, "zb-v", None), (2, "1f1b", None)]
)
def test_a_parameter_that_stages_of_one_rank_share_is_named_as_one_that_ranks_share(num_ranks, schedule, each):
    model = tiny(4, tied=True)
    pipeline = Pipeline(model, num_ranks, schedule=schedule, stages_per_rank=each)
    result, one = pipeline.value_and_grad(*batch(), M), reference.value_and_grad(model, *batch(), M)
    mine, theirs = leaves(result.grads), leaves(one.grads)
    assert [name for name in theirs if not same_bits(mine[name], theirs[name])] == ["embed.weight"]
    assert pipeline.shared_names == {"embed.weight"}


def test_one_stage_shares_nothing():
    assert Pipeline(tiny(4, tied=True), 1).shared_names == set()


@pytest.mark.parametrize("frozen", [["embed", 0], [1], [2], ["embed", 0, 1], [1, 2]])
def test_frozen_stages_at_any_place_leave_the_gradients_of_the_others(frozen):
    model = tiny(3)
    for part in frozen:
        (model.embed if part == "embed" else model.layers[part]).freeze()
    grads = leaves(check(Pipeline(model, 3)).grads)
    assert not [name for name in grads if name.startswith(tuple(f"layers.{part}." for part in frozen))]


@pytest.mark.parametrize(
    ("trained", "down"),
    [
        ((0, 1, 2), [["1B0"], ["2B0"]]),
        ((1, 2), [[], ["2B0"]]),
        ((1,), [[], ["2B0"]]),
        ((2,), [[], []]),
    ],
)
def test_nothing_is_sent_down_that_nobody_needs(trained, down):
    model = tiny(3)
    model.freeze()
    for layer in trained:
        model.layers[layer].unfreeze()
    world = Listening(3)
    Pipeline(model, transport=world).value_and_grad(*batch(), 1)
    assert world.sent == [["0F0"], ["1F0", *down[0]], down[1]]
    # Nor does anybody keep room for it.
    assert world.expected == [down[0], ["0F0", *down[1]], ["1F0"]]


def test_evaluation_sends_nothing_down():
    world = Listening(3)
    Pipeline(tiny(3), transport=world).loss_sum(cut(*batch(), 1))
    assert world.sent == [["0F0"], ["1F0"], []]
    assert world.expected == [[], ["0F0"], ["1F0"]]


# -- models on disk ----------------------------------------------------------------------------------------------------


class OneOf(LoopbackWorld):
    """A process that runs one rank of three, as over a real wire; nothing is sent here."""

    def __init__(self, rank):
        super().__init__(3)
        self.local_ranks = (rank,)


def lazy(directory):
    model, _ = load(str(directory / "model"), lazy=True)
    mx.random.seed(3)
    model.freeze()
    linear_to_lora_layers(model, 6, {"rank": 2, "scale": 4.0, "dropout": 0.0})
    return model


def test_a_lazily_loaded_model_has_the_gradients_of_one_in_memory(demo_directory):
    model, eager = lazy(demo_directory), lazy(demo_directory)
    mx.eval(eager.parameters())
    result = Pipeline(model, 3).value_and_grad(*batch(), M)
    assert_bit_equal(result.grads, reference.value_and_grad(eager, *batch(), M).grads)


@pytest.mark.parametrize(("rank", "layers"), [(0, {0, 1}), (1, {2, 3}), (2, {4, 5})])
def test_a_rank_loads_its_own_stages_weights_and_reads_no_other(demo_directory, rank, layers):
    model = lazy(demo_directory)
    pipeline = Pipeline(model, transport=OneOf(rank))
    pipeline.load()
    read = {name for name, array in leaves(model.parameters()).items() if not is_lazy(array)}
    assert read == set(pipeline.own_names(rank))
    assert {int(name.split(".")[2]) for name in read if name.startswith("model.layers.")} == layers
    others = {name for name in read if not name.startswith("model.layers.")}
    assert others == {0: {"model.embed_tokens.weight"}, 1: set(), 2: {"model.norm.weight", "lm_head.weight"}}[rank]


# -- steps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
def test_steps_of_a_stateful_optimizer_are_the_references(max_grad_norm):
    model, twin = tiny(3, dropout=0.2), tiny(3, dropout=0.2)
    ours, theirs = optim.AdamW(1e-2), optim.AdamW(1e-2)
    pipeline = Pipeline(model, 3, seed=4)
    for step in range(3):
        assert pipeline.num_steps == step
        done = pipeline.step(ours, *batch(seed=step), M, max_grad_norm=max_grad_norm)
        one, norm = reference.step(
            twin, theirs, cut(*batch(seed=step), M), max_grad_norm=max_grad_norm, seed=4, step=step
        )
        assert (done.loss, done.num_tokens, done.grad_norm) == (one.loss.item(), one.num_tokens, norm.item())
        assert done.losses == tuple(loss.item() for loss in one.losses)
    assert pipeline.num_steps == 3
    assert_bit_equal(model.parameters(), twin.parameters())
    assert_bit_equal(dict(sorted(leaves(ours.state).items())), dict(sorted(leaves(theirs.state).items())))


def test_gradients_and_evaluation_are_no_steps():
    pipeline = Pipeline(tiny(2), 2)
    pipeline.value_and_grad(*batch(), M)
    pipeline.loss_sum(cut(*batch(), M))
    assert pipeline.num_steps == 0


def test_a_weight_that_is_not_a_number_stops_the_step_and_changes_nothing():
    model, adam = tiny(3), optim.Adam(1e-2)
    pipeline = Pipeline(model, 3)
    pipeline.step(adam, *batch(), M)
    whole, before = model.layers[1].linear.weight, state_of(model, adam)
    model.layers[1].linear.weight = whole.at[2, 3].add(mx.nan)
    broken = state_of(model, adam)
    with pytest.raises(NonFiniteError, match=r"the loss of microbatch 0 is not a finite number \(and \d+ more\)"):
        pipeline.step(adam, *batch(), M)
    assert_bit_equal(to_tree(state_of(model, adam)), to_tree(broken))
    assert pipeline.num_steps == 1
    # Mended, it goes on as if nothing had been.
    model.layers[1].linear.weight = whole
    assert_bit_equal(to_tree(state_of(model, adam)), to_tree(before))
    expected = reference.value_and_grad(model, *batch(), M).loss.item()
    assert pipeline.step(adam, *batch(), M).loss == expected
    assert pipeline.num_steps == 2


def test_a_gradient_that_is_not_a_number_though_the_loss_is_one_is_named_by_its_parameter():
    def rooted(logits, targets):
        return mx.sqrt(0.0 * logits.sum(-1))  # 0, with an infinite slope times 0

    model, sgd = tiny(2), optim.SGD(0.1)
    before = copied(model.parameters())
    with pytest.raises(NonFiniteError, match=r"the gradient of embed\.weight is not a finite number"):
        Pipeline(model, 2, loss=rooted).step(sgd, *batch(), M)
    assert_bit_equal(model.parameters(), to_tree(before))


def test_an_error_in_a_forward_leaves_the_model_as_it_was_and_closes_only_this_pipeline():
    def failing(logits, targets):
        raise ArithmeticError("the user's own")

    model = tiny(3, dropout=0.1)
    before, classes = copied(model.parameters()), [type(module) for module in model.modules()]
    mx.random.seed(8)
    state = mx.array(mx.random.state[0])
    pipeline = Pipeline(model, 3, loss=failing)
    with pytest.raises(ArithmeticError, match="the user's own"):
        pipeline.value_and_grad(*batch(), M)
    assert [type(module) for module in model.modules()] == classes
    assert_bit_equal(model.parameters(), to_tree(before))
    assert same_bits(mx.random.state[0], state)
    assert model.training
    with pytest.raises(TransportClosed, match=r"the run ended with ArithmeticError: the user's own"):
        pipeline.value_and_grad(*batch(), M)
    check(Pipeline(model, 3))


def test_an_error_in_an_evaluation_leaves_the_model_in_training():
    def failing(logits, targets):
        if not model.training:
            raise ArithmeticError("only then")
        return cross_entropy(logits, targets)

    model = tiny(2)
    pipeline = Pipeline(model, 2, loss=failing)
    check(pipeline)
    with pytest.raises(ArithmeticError, match="only then"):
        pipeline.loss_sum(cut(*batch(), M))
    assert model.training


# -- compiled ----------------------------------------------------------------------------------------------------------


def test_a_compiled_pipeline_follows_the_weights_and_keeps_few_functions():
    """In a process of its own, since `mx.compile` is off here."""
    here = Path(__file__).parent
    variables = {name: value for name, value in os.environ.items() if name != "MLX_DISABLE_COMPILE"}
    variables["PYTHONPATH"] = str(here.parent)
    ended = subprocess.run(
        [sys.executable, here / "compiled_steps.py"], env=variables, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["is_on"]
    assert max(found["differences"]) < 1e-5
    assert max(found["kept"]) == 8
    assert re.fullmatch(r"\[model\] odd_models cannot be compiled: .* MLX_DISABLE_COMPILE=1.*", found["refused"])
