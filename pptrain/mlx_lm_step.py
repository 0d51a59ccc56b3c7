"""mlx-lm's own step for a model: it is compiled, so that a forward which evaluates arrays has none."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.trainer import default_loss

from pptrain import reference
from pptrain.microbatch import Microbatch


def build(model: nn.Module, microbatch: Microbatch) -> None:
    """Build the loss and the gradients as `mlx_lm.lora` does, to see whether it can; they are not computed.

    Args:
        model: Must not be used any more: its forward may have kept arrays that are none.
        microbatch: What to build it for.

    Raises:
        Exception: What MLX or the model's own code raises.
    """
    batch = (microbatch.tokens, microbatch.lengths)
    reference.evaluate(default_loss(model, *batch))  # what the first forward makes and keeps is there when it compiles
    of_model = nn.value_and_grad(model, default_loss)
    with _compiling_as_mlx_lm():
        try:
            mx.compile(lambda *batch: of_model(model, *batch))(*batch)
        except Exception as error:
            error.add_note("in mlx-lm's own step, which is compiled unless MLX_DISABLE_COMPILE=1 is set")
            raise


@contextmanager
def _compiling_as_mlx_lm() -> Generator[None]:
    """Compile for a while, unless this environment wants nothing compiled: then mlx-lm's step is not, either."""
    if "MLX_DISABLE_COMPILE" in os.environ or _is_compiling():
        yield
        return
    mx.enable_compile()
    try:
        yield
    finally:
        mx.disable_compile()


def _is_compiling() -> bool:
    """Whether MLX compiles now, which it tells nobody: a function that is compiled has no number to look at."""
    try:
        mx.compile(lambda array: array + array.item())(mx.array(0))
    except ValueError:
        return True
    return False
