"""Schedules by the names that `--schedule` takes."""

from __future__ import annotations

from difflib import get_close_matches
from functools import partial

from pptrain.errors import ConfigError
from pptrain.interleaved import interleaved
from pptrain.schedule import Builder, gpipe, one_f_one_b, sequential
from pptrain.v_shape import v_half, v_min, zb_v
from pptrain.zero_bubble import zb_h1, zb_h2

SCHEDULES: dict[str, Builder] = {
    "sequential": sequential,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "v-half": v_half,
    "v-min": v_min,
}
"""Training schedules."""


def find_schedule(name: str, stages_per_rank: int | None = None) -> Builder:
    """The schedule of that name.

    Args:
        name: One of `SCHEDULES`.
        stages_per_rank: How many stages each rank holds; by default, and for most schedules, their own number.

    Raises:
        ConfigError: If there is none, and the message has the nearest names; or if it has another number of stages.
    """
    if name not in SCHEDULES:
        near = get_close_matches(name, SCHEDULES, n=2, cutoff=0.3)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise ConfigError(f"[schedule] Unknown schedule {name!r}. Expected one of {', '.join(SCHEDULES)}.{hint}")
    builder = SCHEDULES[name]
    if stages_per_rank is None or stages_per_rank == count_stages_per_rank(builder):
        return builder
    if builder is interleaved:
        return partial(interleaved, stages_per_rank=stages_per_rank)
    raise ConfigError(
        f"[schedule] {name} was asked for with {stages_per_rank} stages a rank. Expected "
        f"{count_stages_per_rank(builder)}. Use --schedule interleaved for another number."
    )


def count_stages_per_rank(builder: Builder) -> int:
    """How many stages a rank holds in the schedules that this one builds."""
    return builder(1, 1).num_stages
