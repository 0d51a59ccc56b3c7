"""What it means that two trees are the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten


def leaves(tree: Any) -> dict[str, Any]:
    """Every leaf by name."""
    return dict(tree_flatten(tree))


def bits(array: mx.array) -> tuple[mx.Dtype, tuple[int, ...], bytes]:
    """All there is to say about an array: NaNs and signs of zeros too."""
    return array.dtype, tuple(array.shape), bytes(memoryview(mx.contiguous(array).reshape(-1).view(mx.uint8)))


def differing(ours: Mapping[str, mx.array], theirs: Mapping[str, mx.array]) -> list[str]:
    """Names of leaves that are not the same bits; both have the same names in the same order."""
    assert list(ours) == list(theirs)
    return [name for name in ours if bits(ours[name]) != bits(theirs[name])]
