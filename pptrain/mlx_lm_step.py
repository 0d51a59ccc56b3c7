"""mlx-lm's own step for a model: it is compiled, so that a forward which evaluates arrays has none."""

from __future__ import annotations

import os
from contextlib import nullcontext

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.trainer import default_loss

from pptrain import reference
from pptrain.compiling import compiling
from pptrain.microbatch import Microbatch


def build(model: nn.Module, microbatch: Microbatch) -> None:
    """Compute loss and gradients, and build them as the step of `mlx_lm.lora` does, to see whether it can.

    Args:
        model: Must not be used any more: its forward may have kept arrays that are none.
        microbatch: What to build it for.

    Raises:
        Exception: What MLX or the model's own code raises.
    """
    batch = (microbatch.tokens, microbatch.lengths)
    of_model = nn.value_and_grad(model, default_loss)
    reference.evaluate(of_model(model, *batch))  # what the first forward makes and keeps is there when it compiles
    # Where this environment wants nothing compiled, mlx-lm's step is not, either.
    with nullcontext() if "MLX_DISABLE_COMPILE" in os.environ else compiling():
        try:
            mx.compile(lambda *batch: of_model(model, *batch))(*batch)
        except Exception as error:
            error.add_note("in mlx-lm's own step, which is compiled unless MLX_DISABLE_COMPILE=1 is set")
            raise
