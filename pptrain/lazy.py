"""Lazy graphs: what an array is computed from, and another array in its place."""

from __future__ import annotations

import io
import re
from collections.abc import Container, Mapping

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
_LINES = re.compile(r'^(?:\{ (?:rank=\w+; )?"(.+)"; \}|"(.+)" -> (\d+)|(\d+) -> "(.+)")$', re.MULTILINE)
"""Of a graph as text: an array, with its rank if it is an end; an array that an operation reads; one that it makes."""


def mentions(end: mx.array, leaves: Mapping[str, mx.array]) -> tuple[bool, list[tuple[str, str]]]:
    """Which of the leaves an unevaluated array is computed from, in the order in which MLX comes upon them.

    A leaf may itself be computed from others: the graph is looked at down to the leaves and no further.

    Returns:
        Whether the array is itself the one leaf that is named; and in MLX's order each leaf where it comes upon it,
        beside nothing, and once more for each operation that reads it, beside that operation: a name that lasts as long
        as the graph.
    """
    picture = picture_of(end, **{_END: end, **leaves})
    arrays, makers, inputs = list[str](), dict[str, str](), dict[str, list[str]]()
    for array, read, reader, maker, made in _LINES.findall(picture):
        if array:
            arrays.append(array)
        elif read:
            inputs.setdefault(reader, []).append(read)
        else:
            makers[made] = maker
    if _END not in arrays:  # a leaf's name has taken its place; what it is computed from comes before it
        return True, [(arrays[len(_arrays(picture_of(end))) - 1], "")]
    return False, _mentions(makers, inputs, leaves)


def _mentions(
    makers: Mapping[str, str], inputs: Mapping[str, list[str]], leaves: Container[str]
) -> list[tuple[str, str]]:
    """MLX's own way through a graph: what an operation reads comes before the operation, each once."""
    found, seen = list[tuple[str, str]](), {_END}
    waiting = [(_END, iter(inputs.get(makers.get(_END, ""), [])))]
    while waiting:
        array, rest = waiting[-1]
        for read in rest:
            if read in seen:
                continue
            seen.add(read)
            if read in leaves:
                found.append((read, ""))
            elif (maker := makers.get(read, "")) not in seen:
                seen.add(maker)
                waiting.append((read, iter(inputs.get(maker, []))))
                break
        else:
            maker = makers.get(array, "")
            found += [(read, maker) for read in inputs.get(maker, []) if read in leaves]
            waiting.pop()
    return found


def _arrays(picture: str) -> list[str]:
    return [array for array, *_ in _LINES.findall(picture) if array]


def picture_of(end: mx.array, **leaves: mx.array) -> str:
    """The graph as text."""
    picture = io.StringIO()
    mx.export_to_dot(picture, end, **leaves)
    return picture.getvalue()
