"""What a segment's vjp graph costs and keeps, read from the graph itself: nothing is evaluated, no weight is read.

The graph has three parts: the forward is all that the output needs; the input part is what the boundary's cotangents
need besides; the weight part is what is left. What the forward makes and another part reads is a residual, and is kept
between the two. Equal computations count once, as in a compiled graph; one that is not compiled casts the same array to
float32 for each of its readers, and so keeps up to a third more in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import mlx.core as mx

from pptrain.microbatch import Microbatch, kept_random_state
from pptrain.model import ArraySpec, Specs
from pptrain.segment import Segment, Work

_VIEWS = {
    "Broadcast",
    "BroadcastAxes",
    "ExpandDims",
    "Slice",
    "Split",
    "Squeeze",
    "StopGradient",
    "Transpose",
    "Unflatten",
}
"""Primitives whose output lies in their input's memory."""
_RESHAPES = {"Flatten", "Reshape"}
"""The same, if the input is contiguous; else they copy."""
_SCATTERING = {"Broadcast", "BroadcastAxes", "Slice", "Split", "Transpose"}
"""Views that are no longer contiguous."""
_PRODUCTS = {"AddMM", "BlockMaskedMM", "GatherMM", "GatherQMM", "Matmul", "QQMatmul", "QuantizedMatmul"}


@dataclass(frozen=True, slots=True)
class Parts:
    """What one microbatch's forward and backward through a segment come to."""

    forward_flops: int
    input_flops: int
    weight_flops: int
    residual_bytes: int
    """Made by the forward and kept for the backward; the segment's input, which is given, is not in it."""


@dataclass(slots=True)
class _Node:
    name: str
    inputs: list[tuple[str, ArraySpec]]
    outputs: list[tuple[str, ArraySpec]]

    @property
    def flops(self) -> int:
        """Of products of matrices: two for each multiplication with its addition. All else is left out."""
        shapes, made = [spec.shape for _, spec in self.inputs], self.outputs[0][1].shape
        if self.name in _PRODUCTS:
            return 2 * prod(made) * shapes[0][-1]
        if self.name == "ScaledDotProductAttention":
            return 4 * prod(made) * shapes[1][-2]
        if self.name == "Convolution":
            return 2 * prod(made) * prod(shapes[1][1:])
        return 0


def examine(segment: Segment, tokens: mx.array, boundary: Specs, outputs: Specs) -> Parts:
    """Look at one segment.

    Args:
        segment: Consecutive sites of the model.
        tokens: int32 `[microbatch_size, seq + 1]`; only the shape matters.
        boundary: What enters the segment; empty where that is the tokens.
        outputs: What leaves it; a scalar where that is the loss.
    """
    try:
        graph = _record(segment, tokens, boundary, outputs, lambda weight: False)
    except ValueError:
        # MLX does not export SegmentedMM, of which the gradients of sorted experts are made.
        graph = _record(segment, tokens, boundary, outputs, lambda weight: weight.ndim > 2)
    forward = graph.needed_for(graph.results["output"])
    if not segment.trains:
        return Parts(graph.flops(forward), 0, 0, 0)
    cotangents = graph.needed_for(graph.results["cotangents"]) - forward
    backward = graph.needed_for(graph.results["grads"]) - forward
    needed = cotangents if segment.passes_cotangent else set[int]()
    # Cotangents that nobody asks for are a part of the graph all the same, and so is what they would read.
    experts = graph.products_with(graph.left_out, forward)
    kept = graph.made_for(cotangents | backward | experts, forward)
    return Parts(
        graph.flops(forward),
        graph.flops(needed),
        graph.flops(backward - needed) + graph.flops(experts),
        sum(graph.sizes[name] for name in kept),
    )


@dataclass
class _Graph:
    """Nodes in an order in which each comes after those that it reads, and whose memory each array lies in."""

    nodes: list[_Node]
    results: Mapping[str, Sequence[str]]
    left_out: set[str]
    """Weights whose gradients are not in the graph."""
    makers: dict[str, int] = field(default_factory=dict[str, int])
    owners: dict[str, str] = field(default_factory=dict[str, str])
    sizes: dict[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        scattered = set[str]()
        for place, node in enumerate(self.nodes):
            source = node.inputs[0][0] if node.inputs else ""
            is_view = node.name in _VIEWS or (node.name in _RESHAPES and source not in scattered)
            for name, spec in node.outputs:
                self.makers[name] = place
                self.owners[name] = self.owners.get(source, source) if is_view else name
                self.sizes[name] = spec.nbytes
                if node.name in _SCATTERING or (is_view and source in scattered):
                    scattered.add(name)

    def needed_for(self, names: Iterable[str]) -> set[int]:
        """The nodes that have to run for these arrays."""
        found, open_ends = set[int](), list(names)
        while open_ends:
            place = self.makers.get(open_ends.pop())
            if place is not None and place not in found:
                found.add(place)
                open_ends.extend(name for name, _ in self.nodes[place].inputs)
        return found

    def made_for(self, readers: set[int], makers: set[int]) -> set[str]:
        """The memory that some nodes read and others wrote; what is given, as weights are, is not in it."""
        read = {self.owners.get(name, name) for place in readers for name, _ in self.nodes[place].inputs}
        return {name for name in read if self.makers.get(name) in makers}

    def products_with(self, weights: set[str], makers: set[int]) -> set[int]:
        """The products that read one of these weights: its gradient is a product as large, and reads what they read."""

        def reads(node: _Node) -> bool:
            return node.name in _PRODUCTS and any(self.owners.get(name, name) in weights for name, _ in node.inputs)

        return {place for place in makers if reads(self.nodes[place])}

    def flops(self, places: set[int]) -> int:
        """Of some nodes together."""
        return sum(self.nodes[place].flops for place in places)


def _record(
    segment: Segment, tokens: mx.array, boundary: Specs, outputs: Specs, leave_out: Callable[[mx.array], bool]
) -> _Graph:
    """The segment's graph as MLX exports it, from arrays that have a shape and are never computed."""
    weights, frozen = segment.parameters()
    into, back = _like(boundary), _like(outputs)
    fixed = [tokens, mx.zeros((tokens.shape[0], 2), mx.int32), mx.array(1.0)]
    counts = list(accumulate(map(len, (fixed, into, back, weights, frozen))))
    left_out = [place for place, weight in enumerate(weights) if leave_out(weight)]
    found: dict[str, int] = {}

    def function(*arrays: mx.array) -> list[mx.array]:
        parts = [list(arrays[a:b]) for a, b in pairwise([0, *counts])]
        results = _results(segment, *parts)
        for place in reversed(left_out):
            results["grads"].pop(place)
        found.update({name: len(arrays) for name, arrays in results.items()})
        return [array for arrays in results.values() for array in arrays]

    records = list[dict[str, Any]]()
    with kept_random_state():
        mx.export_function(records.append, function, *fixed, *into, *back, *weights, *frozen)  # type: ignore[arg-type]
    by_type = {record["type"]: record for record in records}
    ends = iter(name for name, *_ in by_type["outputs"]["outputs"])
    results = {name: [next(ends) for _ in range(count)] for name, count in found.items()}
    given = [name for name, *_ in by_type["inputs"]["inputs"]]
    nodes = [
        _Node(record["name"], _arrays(record["inputs"]), _arrays(record["outputs"]))
        for record in records
        if record["type"] == "primitive"
    ]
    return _Graph(nodes, results, {given[counts[2] + place] for place in left_out})


def _results(
    segment: Segment,
    fixed: list[mx.array],
    boundary: list[mx.array],
    cotangents: list[mx.array],
    weights: list[mx.array],
    frozen: list[mx.array],
) -> dict[str, list[mx.array]]:
    """The three parts of the graph; where nothing trains there is only the first."""
    tokens, lengths, one = fixed
    if segment.trains:
        parts = segment.pure(tokens, lengths, one, boundary, cotangents, weights, frozen)
        return dict(zip(("output", "cotangents", "grads"), parts, strict=True))
    with segment.reading(weights, frozen):
        return {"output": segment.forward(Work(Microbatch(tokens, lengths), 0, one, 0, 0), boundary)}


def _like(specs: Specs) -> list[mx.array]:
    return [mx.zeros(spec.shape, spec.dtype) for spec in specs]


def _arrays(described: Iterable[tuple[str, tuple[int, ...], mx.Dtype]]) -> list[tuple[str, ArraySpec]]:
    return [(name, ArraySpec(tuple(shape), dtype)) for name, shape, dtype in described]
