"""A pipeline in a world where something goes wrong: one device's bits, or an error that names the cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import mlx.core as mx
from blame import may_cause
from equality import bits, differing, leaves
from hypothesis import given, note
from hypothesis import strategies as st
from mlx.utils import tree_map
from strategies import Case, cases, examples, models

from pptrain import reference
from pptrain.pipeline import Pipeline
from transports import LoopbackWorld, TransportError
from transports.faults import Damages, Dies, Fault, Stalls

T = TypeVar("T")


@st.composite
def faulty_cases(draw: st.DrawFn) -> tuple[Case, list[Fault]]:
    """Faults where the messages of a step are: between neighbours, and not far from its beginning."""
    one_each = st.sampled_from(["sequential", "gpipe", "1f1b", "zb-h1", "zb-h2"])
    case = draw(cases(models=models(is_tied=False, min_layers=2, max_layers=4), schedules=one_each, min_ranks=2))
    ranks, numbers = st.integers(0, case.num_ranks - 1), st.integers(0, 20)
    lower = draw(st.integers(0, case.num_ranks - 2))
    source, to = draw(st.permutations([lower, lower + 1]))
    message = st.integers(0, case.num_microbatches)
    deaths = st.builds(
        Dies,
        ranks,
        st.sampled_from(["before", "in", "after"]),
        st.sampled_from(["communication", "instruction"]),
        numbers,
    )
    stalls = st.builds(Stalls, st.just(source), st.just(to), message, st.sampled_from([None, 2.0, 1e6]))
    hows = st.sampled_from(["cut", "flip", "double", "shape"])
    damages = st.builds(Damages, st.just(source), st.just(to), message, hows, st.integers(0, 10_000))
    return case, draw(st.lists(deaths | stalls | damages, min_size=1, max_size=2))


@examples(0.25)
@given(faulty_cases())
def test_a_pipeline_has_one_device_s_bits_or_names_the_cause(faulty: tuple[Case, list[Fault]]):
    case, faults = faulty
    world = LoopbackWorld(
        case.num_ranks,
        capacity=case.world.capacity,
        lanes=case.world.lanes,
        seed=case.world.seed,
        durations=1.0,
        timeout_seconds=1e5,
        check_messages=True,
        faults=faults,
    )
    note(repr(world))
    model, batch, m = case.model.build(), case.batch, case.num_microbatches
    before = leaves(tree_map(mx.array, model.parameters()))
    one = reference.value_and_grad(model, batch.tokens, batch.bounds, m, seed=case.seed)
    pipeline = Pipeline(
        model,
        layers=case.layers,
        schedule=case.schedule,
        recompute=case.recompute,
        transport=world,
        seed=case.seed,
    )
    result = outcome_of(lambda: pipeline.value_and_grad(batch.tokens, batch.bounds, m))
    if isinstance(result, TransportError):
        assert may_cause(result, faults), result
        failed = [str(outcome) for outcome in world.outcomes.values() if isinstance(outcome, Exception)]
        assert all(str(result) in words for words in failed)
    else:
        assert bits(result.loss) == bits(one.loss)
        assert not differing(leaves(result.grads), leaves(one.grads))
    assert not differing(leaves(model.parameters()), before)


def outcome_of(act: Callable[[], T]) -> T | TransportError:
    """What comes of it, an error too."""
    try:
        return act()
    except TransportError as error:
        return error
