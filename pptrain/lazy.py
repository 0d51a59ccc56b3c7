"""Lazy graphs: what an array is computed from, and another array in its place."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping

import mlx.core as mx


def handle(array: mx.array) -> mx.array:
    """Another handle of the same array: what a model does to its own in place is not seen through this one."""
    return array.astype(array.dtype)


def overwritten(array: mx.array, by: mx.array) -> mx.array:
    """Put an array in the place of another: every variable of the model that holds it sees the new one.

    Returns:
        What it is now: not the same node of the graph as `by` where the first dimension is 1.
    """
    array[...] = by
    return handle(array)


_END = "end:"


def sources(end: mx.array, leaves: Mapping[str, mx.array]) -> tuple[bool, list[str]]:
    """Which of the leaves an unevaluated array is computed from, in the order in which MLX comes upon them.

    Returns:
        Whether the array is itself the one leaf that is named; and their names.
    """
    # Each array is a line `{ "name"; }`, with its rank if it is an end; an array comes after what it is computed from,
    # and all leaves that the end does not need come after it.
    picture = picture_of(end, **{_END: end, **leaves})
    nodes = re.findall(r'^\{ (?:rank=\w+; )?"(.+)"; \}$', picture, re.MULTILINE)
    if _END not in nodes:  # a leaf's name has taken its place
        return True, [next(name for name in nodes if name in leaves)]
    return False, [name for name in nodes[: nodes.index(_END)] if name in leaves]


def picture_of(end: mx.array, **leaves: mx.array) -> str:
    """The graph as text."""
    picture = io.StringIO()
    mx.export_to_dot(picture, end, **leaves)
    return picture.getvalue()
