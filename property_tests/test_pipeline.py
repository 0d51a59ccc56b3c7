"""Transparency: whatever the model, cut, schedule, recompute mode and world, a pipeline is one device, bit by bit.

The one exception is a parameter that the first stage and the last share, whose two parts are added in another order.
Its bound, for a leaf of which `g_j` is microbatch j's gradient: one device rounds the sum of the two parts once for
each microbatch, in the parameter's dtype (by half a unit in the last place), the pipeline adds both parts in float32::

    |difference| <= unit(dtype) * sum_j max|g_j|        unit: 2^-8 for bfloat16; 1e-6 covers the additions in float32
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from equality import bits, differing, leaves
from hypothesis import assume, given
from hypothesis import strategies as st
from mlx.utils import tree_map, tree_unflatten
from strategies import (
    SPLIT,
    BatchCase,
    Case,
    ModelCase,
    OptimizerCase,
    WorldCase,
    batches,
    built,
    cases,
    examples,
    gpipe_descending,
    models,
    most_residuals,
    optimizers,
    schedules,
    widths_apart,
    worlds,
)

from pptrain import reference
from pptrain.errors import BatchError
from pptrain.microbatch import Microbatch, count_tokens, cross_entropy, cut, loss_share
from pptrain.optimizer import add_shared
from pptrain.pipeline import Pipeline

NUM_STEPS = 5

SMOOTH = 1e-2
"""Adam's eps where a parameter is shared. Adam divides by |g| + eps: with a small one, an element whose gradient is all
rounding would go by the whole learning rate, one way or the other."""

STEPS_APART = {"float32": 1e-5, "bfloat16": 0.25}
"""After five steps with a shared parameter, relative to a leaf's largest element. In bfloat16 all parameters and
moments are rounded to 2^-8 at every step, so a last bit of the first step has grown; 0.13 was the most that was seen (a
second moment). What each single step does is held to the bits below.

In float32 the bound is known not to hold for every draw: of 146 tied cases 6 exceeded it, by up to 3.7e-5 (second
moments of adapters under Adam), while each single step's gradient stayed below 0.11 of `allowed` and no other leaf
differed. The draws of the `ci` profile are within it."""


# -- what is compared --------------------------------------------------------------------------------------------------


def difference(ours: mx.array, theirs: mx.array) -> float:
    """The largest difference of two elements."""
    return mx.abs(ours.astype(mx.float32) - theirs.astype(mx.float32)).max().item()


def shared_names(case: ModelCase, names: Sequence[str]) -> list[str]:
    """Leaves that the first stage and the last both read."""
    return [name for name in names if case.is_tied and "embed_tokens" in name]


def gradients_of_microbatches(model: nn.Module, case: Case, step: int) -> list[dict[str, mx.array]]:
    """Each microbatch's own gradients, float32."""
    microbatches = cut(case.batch.tokens, case.batch.bounds, case.num_microbatches)
    num_tokens, grads = mx.array(count_tokens(microbatches), mx.float32), list[dict[str, mx.array]]()
    for j, m in enumerate(microbatches):
        with reference.masks_of(model, case.seed, step, j):
            share = lambda m=m: loss_share(model(m.inputs), m, num_tokens, cross_entropy)  # noqa: E731
            tree = nn.value_and_grad(model, share)()[1]
        grads.append(leaves(tree_map(lambda g: g.astype(mx.float32), tree)))
    return grads


def allowed(model: nn.Module, case: Case, step: int, name: str) -> float:
    """How far a shared leaf's gradient may be off: see the top of the file."""
    unit = 1e-6 + (2.0**-8 if leaf_dtype(model, name) == mx.bfloat16 else 0.0)
    return unit * sum(mx.abs(grads[name]).max().item() for grads in gradients_of_microbatches(model, case, step))


def leaf_dtype(model: nn.Module, name: str) -> mx.Dtype:
    """What a parameter is stored in."""
    return leaves(model.parameters())[name].dtype


def pipeline_of(model: nn.Module, case: Case) -> Pipeline:
    """The pipeline that a case describes."""
    return Pipeline(
        model,
        layers=case.layers,
        schedule=case.schedule,
        recompute=case.recompute,
        transport=case.world.build(case.num_ranks),
        seed=case.seed,
    )


def check_gradients(pipeline: Pipeline, case: Case, step: int = 0) -> None:
    """The pipeline's loss and gradients are the reference's, and nothing else has changed."""
    model, batch, m = pipeline.model, case.batch, case.num_microbatches
    one = reference.value_and_grad(model, batch.tokens, batch.bounds, m, seed=case.seed, step=step)
    before, random_state = leaves(tree_map(mx.array, model.parameters())), bits(mx.random.state[0])
    result = pipeline.value_and_grad(batch.tokens, batch.bounds, m, step=step)
    assert not differing(leaves(model.parameters()), before)
    assert bits(mx.random.state[0]) == random_state
    assert result.num_tokens == one.num_tokens == batch.num_tokens
    assert np.isfinite(one.loss.item())
    assert bits(result.loss) == bits(one.loss)
    assert [bits(share) for share in result.losses] == [bits(share) for share in one.losses]
    ours, theirs = leaves(result.grads), leaves(one.grads)
    assert all(mx.isfinite(grad).all().item() for grad in theirs.values())
    other = differing(ours, theirs)
    assert other == (shared_names(case.model, other) if len(case.layers) > 1 else [])
    for name in other:
        assert difference(ours[name], theirs[name]) <= allowed(model, case, step, name)


# -- gradients ---------------------------------------------------------------------------------------------------------


@given(case=cases())
def test_a_pipeline_has_the_loss_and_gradients_of_one_device(case: Case):
    check_gradients(pipeline_of(case.model.build(), case), case)


@examples(0.25)
@given(case=cases(schedules=st.sampled_from([*SPLIT, gpipe_descending]), min_ranks=2))
def test_backwards_in_two_parts_or_in_descending_order_change_no_bit(case: Case):
    check_gradients(pipeline_of(case.model.build(), case), case)


@examples(0.25)
@given(case=cases(models=models(min_layers=4, dropouts=[0.1, 0.3, 0.5]), min_ranks=3))
def test_many_stages_with_dropout_have_the_gradients_of_one_device(case: Case):
    check_gradients(pipeline_of(case.model.build(), case), case)


# -- training steps ----------------------------------------------------------------------------------------------------


def check_steps(case: Case, optimizer: OptimizerCase, steps: Sequence[Sequence[Microbatch]]) -> None:
    """After each step loss and norm are the reference's, and at the end every parameter and moment is."""
    is_exact = len(case.layers) == 1 or not case.model.is_shared
    eps = 1e-8 if is_exact else SMOOTH
    model, twin = case.model.build(), case.model.build()
    ours, theirs = optimizer.build(eps), optimizer.build(eps)
    pipeline, limit = pipeline_of(model, case), optimizer.max_grad_norm
    bound = 0.0 if is_exact else STEPS_APART[case.model.dtype]
    for number, microbatches in enumerate(steps):
        done = pipeline.step_microbatches(ours, microbatches, max_grad_norm=limit)
        one, norm = reference.step(twin, theirs, microbatches, max_grad_norm=limit, seed=case.seed, step=number)
        assert done.num_tokens == one.num_tokens
        assert abs(done.loss - one.loss.item()) <= bound * abs(one.loss.item())
        assert abs(done.grad_norm - norm.item()) <= bound * norm.item()
        if is_exact:
            assert list(done.losses) == [share.item() for share in one.losses]
    for mine, its in [(model.parameters(), twin.parameters()), (ours.state, theirs.state)]:
        mine, its = (dict(sorted(leaves(tree).items())) for tree in (mine, its))
        for name in differing(mine, its):
            assert not is_exact, name
            assert difference(mine[name], its[name]) <= bound * max(mx.abs(its[name]).max().item(), 1e-3), name


@examples(0.25)
@given(case=cases(), optimizer=optimizers())
def test_five_steps_leave_the_parameters_and_moments_of_one_device(case: Case, optimizer: OptimizerCase):
    batches = [case.batch]
    while len(batches) < NUM_STEPS:
        batches.append(batches[-1].next())
    check_steps(case, optimizer, [cut(batch.tokens, batch.bounds, case.num_microbatches) for batch in batches])


@examples(0.25)
@given(case=cases(models=models(is_tied=True), min_ranks=2), optimizer=optimizers())
def test_steps_with_a_shared_parameter_are_mlx_s_own_clipping_and_update(case: Case, optimizer: OptimizerCase):
    """Given the gradients, which are within their bound, norm and update are exact: the shared leaf counts once."""
    model, twin = case.model.build(), case.model.build()
    ours, theirs = optimizer.build(), optimizer.build()
    pipeline, limit = pipeline_of(model, case), optimizer.max_grad_norm
    for number in range(3):
        grads = pipeline.value_and_grad(case.batch.tokens, case.batch.bounds, case.num_microbatches, step=number).grads
        clipped, norm = optim.clip_grad_norm(grads, limit or 1.0)
        chosen = leaves(clipped if limit else grads)
        cast = [(name, grad.astype(leaf_dtype(twin, name))) for name, grad in chosen.items()]
        theirs.update(twin, tree_unflatten(cast))
        mx.eval(twin.parameters(), theirs.state)
        done = pipeline.step(ours, case.batch.tokens, case.batch.bounds, case.num_microbatches, max_grad_norm=limit)
        assert done.grad_norm == norm.item()
        assert not differing(leaves(model.parameters()), leaves(twin.parameters()))
        assert not differing(dict(sorted(leaves(ours.state).items())), dict(sorted(leaves(theirs.state).items())))


@examples(0.25)
@given(case=cases(), optimizer=optimizers(), widths=widths_apart())
def test_microbatches_of_different_widths_make_the_step_of_one_device(
    case: Case, optimizer: OptimizerCase, widths: list[BatchCase]
):
    microbatches = [batch.microbatch for batch in widths]
    check_steps(case, optimizer, [microbatches, microbatches[::-1]])


@given(
    ranks=st.sets(st.integers(0, 4), min_size=2),
    spare_ranks=st.integers(0, 2),
    world=worlds(),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    seed=st.integers(0, 2**16),
)
def test_all_copies_of_a_shared_gradient_are_the_same_sum(
    ranks: set[int], spare_ranks: int, world: WorldCase, shape: tuple[int, int], seed: int
):
    holders, draw = sorted(ranks), np.random.default_rng(seed)
    parts = {rank: mx.array(draw.normal(size=shape).astype(np.float32)) for rank in holders}
    world_size = holders[-1] + 1 + spare_ranks
    loopback = world.build(world_size)
    own = {rank: {"table": parts[rank]} if rank in parts else {} for rank in range(world_size)}
    loopback.run(
        {
            rank: add_shared(loopback.transport(rank), own[rank], holders, "table", mx.zeros(shape))
            for rank in range(world_size)
        }
    )
    total = parts[holders[0]]
    for rank in holders[1:]:
        total = total + parts[rank]
    assert [rank for rank, grads in own.items() if grads] == holders
    assert {bits(own[rank]["table"]) for rank in holders} == {bits(total)}


# -- the batch as a whole ----------------------------------------------------------------------------------------------


@examples(0.5)
@given(case=cases(models=models(dtypes=["float32"], dropouts=[0.0])))
def test_the_cut_into_microbatches_stays_within_1e_5_of_the_whole_batch(case: Case):
    model, batch = case.model.build(), case.batch
    whole = reference.value_and_grad(model, batch.tokens, batch.bounds, 1)
    result = pipeline_of(model, case).value_and_grad(batch.tokens, batch.bounds, case.num_microbatches)
    assert abs(result.loss.item() - whole.loss.item()) <= 1e-5 * abs(whole.loss.item())
    ours, theirs = leaves(result.grads), leaves(whole.grads)
    assert list(ours) == list(theirs)
    largest = max(mx.abs(grad).max().item() for grad in theirs.values())
    assert max(difference(ours[name], theirs[name]) for name in theirs) <= 1e-5 * largest


@given(case=cases(models=models(max_layers=3)))
def test_a_fully_masked_batch_is_refused_before_anything_runs(case: Case):
    pipeline, rows = pipeline_of(case.model.build(), case), len(case.batch.lengths)
    masked = mx.array([[2, 1]] * rows)
    with pytest.raises(BatchError, match=f"all of its {case.num_microbatches} microbatches are fully masked"):
        pipeline.value_and_grad(case.batch.tokens, masked, case.num_microbatches)


# -- evaluation --------------------------------------------------------------------------------------------------------


@examples(0.25)
@given(case=cases(), optimizer=optimizers(), other=st.lists(batches(), min_size=1, max_size=6))
def test_evaluation_has_one_device_s_loss_and_leaves_everything_as_it_was(
    case: Case, optimizer: OptimizerCase, other: list[BatchCase]
):
    model, adam = case.model.build(), optimizer.build()
    pipeline, microbatches = pipeline_of(model, case), [batch.microbatch for batch in other]

    def evaluate() -> None:
        expected = reference.loss_sum(model, microbatches).item()
        before, random_state = leaves(tree_map(mx.array, [model.parameters(), adam.state])), bits(mx.random.state[0])
        assert pipeline.loss_sum(microbatches) == expected
        assert not differing(leaves([model.parameters(), adam.state]), before)
        assert bits(mx.random.state[0]) == random_state
        assert model.training
        assert [pipeline.stage(s).max_live_residuals for s in range(len(case.layers))] == [0] * len(case.layers)

    twin, twin_adam = case.model.build(), optimizer.build()
    undisturbed = pipeline_of(twin, case)
    evaluate()
    for _ in range(2):
        pipeline.step(adam, case.batch.tokens, case.batch.bounds, case.num_microbatches)
        evaluate()
        undisturbed.step(twin_adam, case.batch.tokens, case.batch.bounds, case.num_microbatches)
    assert not differing(leaves(model.parameters()), leaves(twin.parameters()))


# -- what a pipeline keeps, and what it looks at -----------------------------------------------------------------------


@examples(0.5)
@given(case=cases(schedules=schedules()).filter(lambda case: case.model.trains_everything))
def test_live_residuals_are_those_of_the_schedule(case: Case):
    pipeline, m = pipeline_of(case.model.build(), case), case.num_microbatches
    pipeline.value_and_grad(case.batch.tokens, case.batch.bounds, m)
    schedule = built(case.schedule, case.num_ranks, m)
    stages = range(schedule.num_stages)
    rows = [[action for row in schedule.actions for action in row if action.stage == stage] for stage in stages]
    assert [pipeline.stage(s).max_live_residuals for s in stages] == [most_residuals(row) for row in rows]
    assert [pipeline.stage(s).num_live_residuals for s in stages] == [0] * len(stages)


@examples(0.25)
@given(case=cases(), data=st.data())
def test_a_pipeline_sees_what_trains_and_what_the_parameters_are_now(case: Case, data: st.DataObject):
    """Frozen layers and other values between two calls; the model itself stays unpatched."""
    model = case.model.build()
    pipeline = pipeline_of(model, case)
    classes = [type(module) for module in model.modules()]
    check_gradients(pipeline, case)
    assert [type(module) for module in model.modules()] == classes
    every = st.integers(0, case.model.num_layers - 1)
    frozen = data.draw(st.sets(every, max_size=case.model.num_layers - 1), label="frozen layers")
    for i in frozen:
        model.layers[i].freeze()
    assume(set(case.model.trained_layers) - frozen or case.model.trains_embedding or case.model.trains_head)
    model.update(tree_map(lambda p: p * 0.5, model.trainable_parameters()))
    check_gradients(pipeline, case, step=7)
