"""The loop over one device, where that is all it takes."""

import mlx.core as mx
import pytest

from pptrain.config import parse
from pptrain.data import load_data
from pptrain.recipe import load_base, make_optimizer, prepare_training
from pptrain.reference import OneDevice
from pptrain.train import Run, evaluate


@pytest.fixture
def cached_bytes(demo_directory):
    """What MLX keeps for later, after an update's iteration and after an evaluation, under a threshold."""

    def measure(threshold):
        where = ["--model", str(demo_directory / "model"), "--data", str(demo_directory / "data"), "--iters", "2"]
        flags = ["--batch-size", "2", "--max-seq-length", "64", "--clear-cache-threshold", threshold]
        config = parse([*where, *flags, "--val-batches", "1", "--steps-per-report", "9", "--num-layers", "1"])
        loaded = load_base(config)
        data = load_data(config, loaded.tokenizer, None)
        prepare_training(loaded.model, config)
        seen = []
        run = Run(OneDevice(loaded.model, 0), config, make_optimizer(config), data.train)
        run.advanced = lambda iteration: seen.append(mx.get_cache_memory())
        run.run()
        evaluate(run.engine, data.valid, config, 1)
        return seen[0], mx.get_cache_memory()

    yield measure
    mx.clear_cache()


def test_the_cache_is_cleared_above_the_threshold_after_updates_and_evaluations(cached_bytes):
    assert max(cached_bytes("0")) < 10_000
    assert min(cached_bytes("4GB")) > 100_000
