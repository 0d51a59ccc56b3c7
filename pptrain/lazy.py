"""Lazy graphs: what an array is computed from, and another array in its place."""

from __future__ import annotations

import io
import re
from collections.abc import Container, Mapping

import mlx.core as mx


def handle(array: mx.array) -> mx.array:
    """Another handle of the same array: what a model does to its own in place is not seen through this one."""
    return array.astype(array.dtype)


def is_stopped(array: mx.array) -> bool:
    """Whether an unevaluated array is what `mx.stop_gradient` returned: MLX's vjp takes no cotangent for it."""
    operations = re.findall(r'\[label ="(\w+)"', picture_of(array))
    return bool(operations) and operations[-1] == "StopGradient"


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


def origins(ends: Mapping[str, mx.array], leaves: Mapping[str, mx.array]) -> dict[str, set[str]]:
    """Which of the leaves each of many unevaluated arrays is computed from, found in one walk.

    Returns:
        For each end the names of its leaves; an array that is itself a leaf is its own.
    """
    same = {id(array): name for name, array in leaves.items()}
    found = {end: {same[id(array)]} for end, array in ends.items() if id(array) in same}
    computed = [end for end in ends if end not in found]
    known = {f"leaf:{number}": name for number, name in enumerate(leaves)}
    named = dict(zip(known, leaves.values(), strict=True))
    marked = {f"{_END}{number}": ends[end] for number, end in enumerate(computed)}
    into = _edges(marked, named) if computed else {}
    for number, end in enumerate(computed):
        mark = f"{_END}{number}"
        is_marked = mark in into
        found[end] = _above(mark, into, known) if is_marked else {leaf for leaf, _ in mentions(ends[end], leaves)[1]}
    return {end: found[end] for end in ends}


def _edges(ends: Mapping[str, mx.array], leaves: Mapping[str, mx.array]) -> dict[str, list[str]]:
    """What goes into each node of the graph of several arrays."""
    picture, into = io.StringIO(), dict[str, list[str]]()
    mx.export_to_dot(picture, *ends.values(), **{**ends, **leaves})
    for source, node in re.findall(r'^"?([^"\n]+?)"? -> "?([^"\n]+?)"?$', picture.getvalue(), re.MULTILINE):
        into.setdefault(node, []).append(source)
    return into


def _above(node: str, into: Mapping[str, list[str]], known: Mapping[str, str]) -> set[str]:
    """The leaves from which a node can be come to."""
    found, seen, left = set[str](), {node}, [node]
    while left:
        for source in into.get(left.pop(), ()):
            if source in known:
                found.add(known[source])
            elif source not in seen:
                seen.add(source)
                left.append(source)
    return found


def picture_of(end: mx.array, **leaves: mx.array) -> str:
    """The graph as text."""
    picture = io.StringIO()
    mx.export_to_dot(picture, end, **leaves)
    return picture.getvalue()
