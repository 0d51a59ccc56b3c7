"""Settings that must stand before MLX is imported.

On a CPU each fused kernel is compiled by the system's C++ compiler in every process, which takes seconds a kernel; the
tests run without `mx.compile`, and the few that test it turn it on for themselves.
"""

import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

os.environ.setdefault("MLX_DISABLE_COMPILE", "1")

# A shell that starts the tests in the background lets interrupts be ignored, and so would every process of a test.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def demo_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model, tokenizer and data: a real model directory, made once."""
    from pptrain.demo import write_demo

    directory = tmp_path_factory.mktemp("demo")
    write_demo(directory)
    return directory


@pytest.fixture
def exact_memory() -> Generator[None]:
    """Let MLX count what is asked for: a buffer that it takes from its cache may be larger."""
    import mlx.core as mx

    mx.clear_cache()
    limit = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(limit)
