"""Transparency: whatever the model, cut, schedule, recompute mode and world, a pipeline is one device, bit by bit.

The one exception is a parameter that the first stage and the last share, whose two parts are added in another order.
Its bound, for a leaf of which `g_j` is microbatch j's gradient: one device rounds the sum of the two parts once for
each microbatch, in the parameter's dtype (by half a unit in the last place), the pipeline adds both parts in float32::

    |difference| <= unit(dtype) * sum_j max|g_j|        unit: 2^-8 for bfloat16; 1e-6 covers the additions in float32

Each step is held to that: from the pipeline's own state its loss is one device's to the bit, its gradients are but for
this bound, and its update is exactly MLX's of these gradients.

How far that leads after several steps is a property of the model and the optimizer (a small gradient's share of Adam's
denominator, a last bit of bfloat16), not of the pipeline, so no constant bounds it. It is measured for each case, on
one device: the same steps with each element of the shared gradient moved by the bound above, all away from zero, all
towards it (the farthest that the norm can go), or at random. A pipeline may be as far from one device as the farthest
of these runs, and as other roundings on equal terms bring two runs whose parameters are no longer the same bits (u is
half a unit in the last place: 2^-24, 2^-9 for bfloat16). Both are norms over all leaves of a kind (parameters, first
moments, ...): a leaf whose gradient is what large ones leave when they cancel is all rounding, on one device too::

    |difference| <= max over nudged runs |nudged - one device| + steps * 16 u * |one device|

Of 735 random cases with a shared parameter none was beyond 0.19 of this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

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
    Adapter,
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
from pptrain.config import TrainConfig
from pptrain.errors import BatchError
from pptrain.job import open_checkpoints
from pptrain.microbatch import Microbatch, count_tokens, cross_entropy, cut, loss_share
from pptrain.optimizer import add_shared
from pptrain.pipeline import Pipeline
from pptrain.progress import Progress, mlx_state, numpy_state
from pptrain.saving import Checkpoints

NUM_STEPS = 5
SETTINGS = {"seed": "0"}
"""Of checkpoints: the same each time."""

SMOOTH = 1e-2
"""Adam's eps where a parameter is shared. Adam divides by |g| + eps: with a small one, an element whose gradient is all
rounding would go by the whole learning rate, one way or the other."""

ROUNDINGS = 16
"""How many roundings, all the same way, two steps from parameters that differ in last bits may be apart."""

Nudge = Callable[[mx.array], mx.array]
"""Of a gradient: by how many times its bound each element is moved."""

NUDGES: list[Nudge] = [
    mx.sign,
    lambda grad: -mx.sign(grad),
    lambda grad: mx.random.bernoulli(0.5, grad.shape, mx.random.key(0)) * 2.0 - 1,
    lambda grad: mx.random.bernoulli(0.5, grad.shape, mx.random.key(1)) * 2.0 - 1,
]


# -- what is compared --------------------------------------------------------------------------------------------------


def difference(ours: mx.array, theirs: mx.array) -> float:
    """The largest difference of two elements."""
    return mx.abs(ours.astype(mx.float32) - theirs.astype(mx.float32)).max().item()


def shared_names(case: ModelCase, names: Sequence[str]) -> list[str]:
    """Leaves that the first stage and the last both read."""
    return [name for name in names if case.is_tied and "embed_tokens" in name]


def allowed(model: nn.Module, microbatches: Sequence[Microbatch], seed: int, step: int) -> dict[str, float]:
    """How far each leaf's gradient may be off if it is shared: see the top of the file."""
    num_tokens, largest = mx.array(count_tokens(microbatches), mx.float32), dict[str, float]()
    for j, m in enumerate(microbatches):
        with reference.masks_of(model, seed, step, j):
            share = lambda m=m: loss_share(model(m.inputs), m, num_tokens, cross_entropy)  # noqa: E731
            grads = leaves(nn.value_and_grad(model, share)()[1])
        for name, grad in grads.items():
            largest[name] = largest.get(name, 0.0) + mx.abs(grad.astype(mx.float32)).max().item()
    return {name: unit(leaf_dtype(model, name)) * total for name, total in largest.items()}


def unit(dtype: mx.Dtype) -> float:
    """By how much of itself one rounding of a sum in this dtype, and all additions in float32, may change it."""
    return 1e-6 + (2.0**-8 if dtype == mx.bfloat16 else 0.0)


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
    within = allowed(model, cut(batch.tokens, batch.bounds, m), case.seed, step) if other else {}
    for name in other:
        assert difference(ours[name], theirs[name]) <= within[name]


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


@dataclass
class OneDevice:
    """One device's run, as it is or with the gradients of shared leaves nudged."""

    model: nn.Module
    optimizer: optim.Optimizer
    case: Case
    max_grad_norm: float | None
    nudge: Nudge | None = None

    def step(self, number: int, microbatches: Sequence[Microbatch]) -> tuple[reference.Result, mx.array]:
        """One update; returns the result and the norm."""
        result = reference.of_microbatches(self.model, microbatches, seed=self.case.seed, step=number)
        grads = leaves(result.grads)
        if self.nudge:
            within = allowed(self.model, microbatches, self.case.seed, number)
            for name in shared_names(self.case.model, list(grads)):
                grads[name] = grads[name] + within[name] * self.nudge(grads[name])
        return result, reference.update(
            self.model, self.optimizer, tree_unflatten(list(grads.items())), self.max_grad_norm
        )

    def state(self) -> dict[str, mx.array]:
        """Every parameter and moment."""
        return dict(sorted(leaves({"parameters": self.model.parameters(), "moments": self.optimizer.state}).items()))


def distance(ours: Mapping[str, mx.array], theirs: Mapping[str, mx.array]) -> float:
    """The norm of the difference of two trees."""
    return np.sqrt(sum((ours[name].astype(mx.float32) - theirs[name]).square().sum().item() for name in theirs))


def check_apart(
    ours: Mapping[str, mx.array], one: Mapping[str, mx.array], nudged: Sequence[Mapping[str, mx.array]], rounding: float
) -> None:
    """Ours are no farther from one device's than the top of the file says, in each kind of leaves."""
    assert list(ours) == list(one)
    for kind in {kind_of(name) for name in one}:
        its = {name: array for name, array in one.items() if kind_of(name) == kind}
        zero = dict.fromkeys(its, mx.array(0.0))
        bound = max(distance(other, its) for other in nudged) + rounding * distance(its, zero)
        assert distance(ours, its) <= bound, kind


def kind_of(name: str) -> str:
    """Which leaves are measured together: all parameters, or one optimizer's moments of one name."""
    return name.rpartition(".")[2] if name.startswith("moments") else name.partition(".")[0]


TakeUp = Callable[[int, Pipeline, OneDevice, Callable[[], OneDevice]], tuple[Pipeline, OneDevice]]
"""Given the number of the step that comes next, what steps, its model and optimizer, and how to make others."""


def check_steps(
    case: Case, optimizer: OptimizerCase, steps: Sequence[Sequence[Microbatch]], take_up: TakeUp | None = None
) -> None:
    """After each step loss and norm are the reference's, and at the end every parameter and moment is."""
    is_exact = len(case.layers) == 1 or not case.model.is_shared
    limit, eps = optimizer.max_grad_norm, 1e-8 if is_exact else SMOOTH
    rounding = ROUNDINGS * (2.0**-9 if case.model.dtype == "bfloat16" else 2.0**-24)

    def one_device(nudge: Nudge | None = None) -> OneDevice:
        return OneDevice(case.model.build(), optimizer.build(eps), case, limit, nudge)

    ours, one = one_device(), one_device()
    nudged = [] if is_exact else [one_device(nudge) for nudge in NUDGES]
    pipeline = pipeline_of(ours.model, case)
    for number, microbatches in enumerate(steps):
        if take_up is not None:
            pipeline, ours = take_up(number, pipeline, ours, one_device)
        done = pipeline.step_microbatches(ours.optimizer, microbatches, max_grad_norm=limit)
        result, norm = one.step(number, microbatches)
        assert done.num_tokens == result.num_tokens
        if is_exact:
            assert (done.loss, done.grad_norm) == (result.loss.item(), norm.item())
            assert list(done.losses) == [share.item() for share in result.losses]
        else:
            others = [other.step(number, microbatches) for other in nudged]
            said = {"loss": mx.array(done.loss), "norm": mx.array(done.grad_norm)}
            check_apart(said, numbers(result, norm), [numbers(*other) for other in others], (number + 1) * rounding)
    if is_exact:
        assert not differing(ours.state(), one.state())
    else:
        check_apart(ours.state(), one.state(), [other.state() for other in nudged], len(steps) * rounding)


def numbers(result: reference.Result, norm: mx.array) -> dict[str, mx.array]:
    """What a step says."""
    return {"loss": result.loss, "norm": norm}


@examples(0.25)
@given(case=cases(), optimizer=optimizers())
def test_five_steps_leave_the_parameters_and_moments_of_one_device(case: Case, optimizer: OptimizerCase):
    batches = [case.batch]
    while len(batches) < NUM_STEPS:
        batches.append(batches[-1].next())
    check_steps(case, optimizer, [cut(batch.tokens, batch.bounds, case.num_microbatches) for batch in batches])


# By the step before which a checkpoint is gone on from, so many layers a stage, and in this order.
CHANGES = {3: ((3, 1), "gpipe"), 6: ((4,), "sequential"), 9: ((2, 1, 1), "zb-h1")}


@pytest.mark.parametrize("name", ["adam", "adafactor"])
@pytest.mark.parametrize("adapter", ["lora", "dora", "full"])
def test_a_shared_parameter_over_changes_of_stages_is_as_near_to_one_device_as_over_steps(
    adapter: Adapter, name: Literal["adam", "adafactor"], tmp_path: Path
):
    """Three, two, one and three stages; what is gone on from is what was left, to the bit, copies included."""
    dropout = 0.0 if adapter == "full" else 0.1
    model = ModelCase(
        "llama", 4, 2, True, "float32", 1, adapter, False, (0, 1, 2, 3), True, True, False, dropout, seed=5
    )
    assert model.is_shared
    batch = BatchCase(6, ((1, 6), (2, 5), (1, 3), (3, 9)), seed=11)
    case = Case(model, (1, 1, 2), batch, 2, "1f1b", "none", WorldCase(0, "single", 3), seed=7)

    def take_up(number: int, pipeline: Pipeline, left: OneDevice, make: Callable[[], OneDevice]) -> Any:
        if number not in CHANGES:
            return pipeline, left
        layers, schedule = CHANGES[number]
        progress = Progress(number, pipeline.num_steps, 0, number, numpy_state(), numpy_state(), mlx_state())
        assert Checkpoints(tmp_path, 2, SETTINGS).save(pipeline, left.optimizer, progress)
        found = make()
        later = pipeline_of(found.model, replace(case, layers=layers, schedule=schedule))
        config = TrainConfig(checkpoint_dir=str(tmp_path), resume="auto")
        progress, _ = open_checkpoints(config, later, found.optimizer, SETTINGS)
        assert progress is not None
        later.num_steps = progress.num_steps
        assert (number, later.num_steps, not differing(found.state(), left.state())) == (number, number, True)
        return later, found

    steps = [batch]
    while len(steps) < 12:
        steps.append(steps[-1].next())
    check_steps(case, OptimizerCase(name, 0.1), [cut(each.tokens, each.bounds, 2) for each in steps], take_up)


@examples(0.25)
@given(case=cases(models=models(is_tied=True), min_ranks=2), optimizer=optimizers())
def test_each_step_with_a_shared_parameter_is_one_device_s_but_for_the_bound(case: Case, optimizer: OptimizerCase):
    """Given the gradients, which are within their bound, norm and update are exact: the shared leaf counts once."""
    model, twin = case.model.build(), case.model.build()
    ours, theirs = optimizer.build(), optimizer.build()
    pipeline, limit = pipeline_of(model, case), optimizer.max_grad_norm
    for number in range(NUM_STEPS):
        batch, m = case.batch, case.num_microbatches
        check_gradients(pipeline, case, number)
        grads = pipeline.value_and_grad(batch.tokens, batch.bounds, m, step=number).grads
        norm = reference.update(twin, theirs, grads, limit)
        done = pipeline.step(ours, batch.tokens, batch.bounds, m, max_grad_norm=limit)
        assert done.grad_norm == norm.item()
        assert not differing(leaves(model.parameters()), leaves(twin.parameters()))
        assert not differing(dict(sorted(leaves(ours.state).items())), dict(sorted(leaves(theirs.state).items())))
        case = replace(case, batch=batch.next())


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
    num_stages = len(case.layers)

    def kept() -> list[tuple[int, int]]:
        stages = [pipeline.stage(s) for s in range(num_stages)]
        return [(stage.max_live_residuals, stage.num_live_residuals) for stage in stages]

    def evaluate() -> None:
        expected, residuals = reference.loss_sum(model, microbatches).item(), kept()
        before, random_state = leaves(tree_map(mx.array, [model.parameters(), adam.state])), bits(mx.random.state[0])
        assert pipeline.loss_sum(microbatches) == expected
        assert not differing(leaves([model.parameters(), adam.state]), before)
        assert bits(mx.random.state[0]) == random_state
        assert model.training
        assert kept() == residuals
        assert [pipeline.stage(s, is_trained=False).max_live_residuals for s in range(num_stages)] == [0] * num_stages

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
