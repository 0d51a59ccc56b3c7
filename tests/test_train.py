"""The loop over one device, where that is all it takes."""

from types import SimpleNamespace

import mlx.core as mx
import pytest

from pptrain.config import parse
from pptrain.data import load_data
from pptrain.pipeline import Pipeline
from pptrain.recipe import load_base, make_optimizer, prepare_training
from pptrain.reference import OneDevice
from pptrain.train import Run, evaluate
from transports import LoopbackWorld, PeerLost
from transports.faults import Dies


@pytest.fixture
def prepared(demo_directory):
    """What a run is made of, under a threshold for the cache."""

    def prepare(threshold):
        where = ["--model", str(demo_directory / "model"), "--data", str(demo_directory / "data"), "--iters", "2"]
        flags = ["--batch-size", "2", "--max-seq-length", "64", "--clear-cache-threshold", threshold]
        config = parse([*where, *flags, "--val-batches", "1", "--steps-per-report", "9", "--num-layers", "1"])
        loaded = load_base(config)
        data = load_data(config, loaded.tokenizer, None)
        prepare_training(loaded.model, config)
        return SimpleNamespace(config=config, model=loaded.model, data=data)

    yield prepare
    mx.clear_cache()


@pytest.fixture
def cached_bytes(prepared):
    """What MLX keeps for later, after an update's iteration and after an evaluation, under a threshold."""

    def measure(threshold):
        of, seen = prepared(threshold), []
        run = Run(OneDevice(of.model, 0), of.config, make_optimizer(of.config), of.data.train)
        run.advanced = lambda iteration: seen.append(mx.get_cache_memory())
        run.run()
        evaluate(run.engine, of.data.valid, of.config, 1)
        return seen[0], mx.get_cache_memory()

    return measure


def test_a_model_is_in_training_mode_before_anybody_looks_at_it(prepared):
    """`mlx_lm.load` gives it in evaluation mode, in which some forwards keep what they make of the weights."""
    assert all(module.training for module in prepared("4GB").model.modules())


@pytest.mark.parametrize(("flags", "is_trained"), [([], True), (["--train", "--test"], True), (["--test"], False)])
def test_a_base_is_loaded_in_the_mode_of_its_run(demo_directory, flags, is_trained):
    model = load_base(parse(["--model", str(demo_directory / "model"), "--data", "data", *flags])).model
    assert {module.training for module in model.modules()} == {is_trained}


def test_the_cache_is_cleared_above_the_threshold_after_updates_and_evaluations(cached_bytes):
    assert max(cached_bytes("0")) < 10_000
    assert min(cached_bytes("4GB")) > 100_000


def test_the_cache_is_left_alone_when_a_rank_is_lost(prepared):
    """To clear it MLX waits, holding Python's lock, for sends that would never leave over a wire of processes."""
    of = prepared("0")
    pipeline = Pipeline(of.model, 2, transport=LoopbackWorld(2, faults=[Dies(1, "after", "instruction", 4)]))
    run = Run(pipeline, of.config, make_optimizer(of.config), of.data.train)
    with pytest.raises(PeerLost, match=r"rank 1\] died"):
        run.run()
    assert mx.get_cache_memory() > 100_000
