"""Every forward and backward built once and never evaluated: whether MLX has a gradient for all that a model does."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from pptrain.errors import ModelError
from pptrain.microbatch import Microbatch, kept_random_state
from pptrain.model import find_layers
from pptrain.partition import ranges
from pptrain.segment import Cut, Segment, Work
from pptrain.sizes import specs_back, specs_into
from pptrain.trace import SAMPLE


def dry_run(cut: Cut, layers: Sequence[int]) -> None:
    """Build the graphs of all stages, whichever rank runs them, so that every rank finds the same.

    Args:
        cut: The model; no weight is read.
        layers: Of each stage.

    Raises:
        ModelError: If an operation has no gradient and needs one, with its stage and layer.
    """
    rows, seq = SAMPLE
    work = Work(Microbatch(mx.zeros((rows, seq + 1), mx.int32), mx.array([[1, seq]] * rows)), 0, mx.array(1.0), 0, 0)
    with kept_random_state():
        for site in range(cut.num_sites):
            try:
                _differentiate(Segment(cut, range(site, site + 1)), work, cut)
            except (RuntimeError, ValueError, TypeError) as error:
                raise ModelError(_no_gradient(cut, layers, site, error)) from error


def _differentiate(segment: Segment, work: Work, cut: Cut) -> None:
    site, tokens = segment.sites.start, work.microbatch.tokens
    into, back = (
        [mx.zeros(spec.shape, spec.dtype) for spec in specs]
        for specs in (specs_into(cut, site, tokens), specs_back(cut, site + 1, tokens))
    )
    segment.differentiate(work, into, back)


def _no_gradient(cut: Cut, layers: Sequence[int], site: int, error: Exception) -> str:
    position = max(site - 1, 0)
    called = (call.layer for call in cut.trace.calls if call.position == position)
    number = next(layer for layer in called if layer is not None)
    before = "What comes before layer" if site == 0 else "Layer"
    behind = ", or what comes after the layers," if site == cut.num_sites - 1 else ""
    where = f"{before} {number} ({type(find_layers(cut.model)[number]).__name__}){behind}"
    stage = next(stage for stage, own in enumerate(ranges(layers)) if position in own)
    return (
        f"[stage {stage}] {where} cannot be trained: {' '.join(str(error).split())} Expected operations that "
        "have a gradient wherever something at or before them trains. Train fewer layers, all of them behind it "
        "(--num-layers), or let the layer do this in another way."
    )
