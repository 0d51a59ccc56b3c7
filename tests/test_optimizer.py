"""From gradients to one update, held to MLX's own clipping and optimizers bit by bit."""

import math

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_map
from tiny import assert_bit_equal, copied, leaves, same_bits, tiny

from pptrain.errors import NonFiniteError
from pptrain.model import find_slots
from pptrain.optimizer import add_shared, add_up, check_finite, clip, global_norm, square_sum, to_tree, update
from transports import LoopbackWorld

SEEDS = range(5)


def random_tree(seed):
    """Gradients of a tiny model's names; magnitudes differ within a tree, where the order of the sum matters, and
    between trees, where what is added to a small norm does.
    """
    draw = np.random.default_rng(seed)
    shapes = {name: array.shape for name, array in leaves(tiny(3).parameters()).items()}
    drawn = {name: draw.normal(0, 10.0 ** (draw.integers(-3, 3) - seed), shape) for name, shape in shapes.items()}
    return to_tree({name: mx.array(values.astype(np.float32)) for name, values in drawn.items()})


def norm_of(tree):
    return global_norm([square_sum(grad).item() for grad in leaves(tree).values()])


# -- norm and clipping -------------------------------------------------------------------------------------------------


def test_norms_3_and_4_give_5():
    assert norm_of({"a": mx.array([3.0]), "b": mx.array([0.0, 4.0])}).item() == 5


@pytest.mark.parametrize("seed", SEEDS)
def test_the_global_norm_is_mlxs_bit_for_bit(seed):
    tree = random_tree(seed)
    assert same_bits(norm_of(tree), optim.clip_grad_norm(tree, 1.0)[1])


@pytest.mark.parametrize("share", [0.3, 2.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_clipping_is_mlxs_bit_for_bit_above_and_below_the_largest_norm(seed, share):
    tree = random_tree(seed)
    norm = norm_of(tree)
    max_norm = share * norm.item()
    clipped = to_tree(clip(leaves(tree), norm, max_norm))
    assert_bit_equal(clipped, optim.clip_grad_norm(tree, max_norm)[0])
    changed = [name for name, grad in leaves(clipped).items() if not same_bits(grad, leaves(tree)[name])]
    assert bool(changed) == (share < 1)


def test_numbers_are_added_in_their_order_each_sum_rounded_to_float32():
    assert add_up([1e8, 1.0, -1e8]) == 0
    assert add_up([1e8, -1e8, 1.0]) == 1
    assert add_up([0.1]) == float(np.float32(0.1)) != 0.1
    assert add_up([]) == 0


def test_a_sum_beyond_float32_is_an_infinity_and_no_warning():
    assert add_up([3e38, 3e38]) == math.inf
    assert math.isnan(add_up([math.inf, -math.inf]))


# -- what is not finite ------------------------------------------------------------------------------------------------


def test_finite_losses_and_gradients_pass():
    check_finite([0.0, 1e30], {"a": 0.0, "b": 3e38})
    check_finite([], {})


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_first_loss_that_is_not_finite_is_named_by_its_microbatch(bad):
    with pytest.raises(NonFiniteError, match=r"\[step\] the loss of microbatch 1 is not a finite number \(and 2 more"):
        check_finite([1.0, bad, 1.0, bad], {"a": 1.0, "b": bad})


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_first_gradient_that_is_not_finite_is_named_by_its_parameter(bad):
    with pytest.raises(NonFiniteError, match=r"the gradient of layers\.1\.w is not a finite number\. .* Nothing was"):
        check_finite([1.0], {"layers.0.w": 1.0, "layers.1.w": bad})


# -- update ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: optim.Adam(1e-2), lambda: optim.SGD(1e-2, momentum=0.9)])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_an_update_is_mlxs_and_parameters_and_moments_keep_the_parameters_dtype(dtype, make):
    model, twin, ours, theirs = tiny(3, dtype=dtype), tiny(3, dtype=dtype), make(), make()
    for seed in range(2):
        tree = random_tree(seed)
        update(ours, model, find_slots(model), leaves(tree))
        theirs.update(twin, tree_map(lambda grad: grad.astype(dtype), tree))
    assert_bit_equal(model.parameters(), twin.parameters())
    assert_bit_equal(ours.state, theirs.state)
    assert {array.dtype for array in leaves(model.parameters()).values()} == {dtype}
    moments = {name: array for name, array in leaves(ours.state).items() if name.split(".")[0] in ("embed", "layers")}
    assert moments
    assert {array.dtype for array in moments.values()} == {dtype}


def test_an_update_changes_the_parameters_that_have_a_gradient_and_no_others():
    model = tiny(3)
    before = copied(model.parameters())
    some = {name: grad for name, grad in leaves(random_tree(0)).items() if name.startswith("layers.2.")}
    update(optim.SGD(0.1), model, find_slots(model), some)
    changed = {name for name, array in leaves(model.parameters()).items() if not same_bits(array, before[name])}
    assert changed == some.keys() == {"layers.2.linear.weight", "layers.2.linear.bias"}


def test_a_rank_without_gradients_updates_nothing():
    model = tiny(1)
    before = copied(model.parameters())
    update(optim.Adam(0.1), model, find_slots(model), {})
    assert_bit_equal(model.parameters(), to_tree(before))


def test_a_tree_has_the_models_own_shape():
    tree = to_tree({"layers.0.w": mx.array(1.0), "layers.2.w": mx.array(2.0), "head": mx.array(3.0)})
    assert [bool(layer) for layer in tree["layers"]] == [True, False, True]
    assert leaves(tree).keys() == {"layers.0.w", "layers.2.w", "head"}
    assert to_tree({}) == {}


# -- shared parameters -------------------------------------------------------------------------------------------------


def shared_sum(parts, holders, world_size):
    """What each rank holds after `add_shared`, given each holder's part."""
    world = LoopbackWorld(world_size)
    own = [{"other": mx.array([7.0])} | ({"table": parts[r]} if r in parts else {}) for r in range(world_size)]
    template = mx.zeros(next(iter(parts.values())).shape, mx.bfloat16)
    tasks = {r: add_shared(world.transport(r), own[r], holders, "table", template) for r in range(world_size)}
    world.run(tasks)
    return own


def test_two_holders_get_the_same_sum():
    own = shared_sum({0: mx.array([1.0, 2.0]), 1: mx.array([10.0, 20.0])}, [0, 1], 2)
    assert [grads["table"].tolist() for grads in own] == [[11.0, 22.0]] * 2
    assert [grads["other"].item() for grads in own] == [7.0] * 2


def test_a_rank_between_two_holders_hands_the_sum_on_and_keeps_none():
    own = shared_sum({0: mx.array([1.0, 2.0]), 2: mx.array([10.0, 20.0])}, [0, 2], 3)
    assert own[0]["table"].tolist() == own[2]["table"].tolist() == [11.0, 22.0]
    assert own[1].keys() == {"other"}


def test_three_holders_add_in_the_order_of_the_ranks_and_in_float32():
    tiny_part = mx.array([2.0**-24])  # lost beside 1 when it is added to it, and not when both are added first
    own = shared_sum({0: tiny_part, 1: tiny_part, 2: mx.array([1.0])}, [0, 1, 2], 3)
    assert [grads["table"].item() for grads in own] == [1 + 2.0**-23] * 3
    own = shared_sum({0: mx.array([1.0]), 1: tiny_part, 2: tiny_part}, [0, 1, 2], 3)
    assert [grads["table"].item() for grads in own] == [1.0] * 3
    assert {grads["table"].dtype for grads in own} == {mx.float32}


def test_ranks_outside_the_holders_say_nothing():
    world = LoopbackWorld(4)
    for rank in (0, 3):
        assert list(add_shared(world.transport(rank), {}, [1, 2], "table", mx.zeros(2))) == []
