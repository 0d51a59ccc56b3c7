"""Layers -> contiguous stages. Pure; every layer in exactly one stage, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf

from pptrain.errors import PartitionError

Needs = Callable[[int, range], float]
"""`needs(stage, sites)`: bytes that a stage needs to hold and run these sites of the forward.

Sites are numbered as in `pptrain.model.Trace`: 0 is all before the first layer (the embedding), i + 1 is layer i, and
the last layer's has what follows it (the norm and the head).
"""


def even(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage when they are divided as evenly as can be.

    The remainder is spread, one layer for each of the stages in the middle: the first stage has the embedding and the
    last the head besides their layers, so those are the last to get one more::

        even(10, 3) == (3, 4, 3)
        even(30, 4) == (7, 8, 8, 7)

    Raises:
        PartitionError: If there are fewer layers than stages, or no stage.
    """
    _check_num_stages(num_layers, num_stages)
    share, extra = divmod(num_layers, num_stages)
    first = (num_stages - extra) // 2
    return tuple(share + (first <= stage < first + extra) for stage in range(num_stages))


def explicit(num_layers: int, sizes: Sequence[int], num_stages: int | None = None) -> tuple[int, ...]:
    """Layers of each stage as the user listed them, checked.

    Raises:
        PartitionError: If a stage is empty, if the sum is not the model's, or if the number of stages is another one.
    """
    sizes = tuple(sizes)
    text = ",".join(map(str, sizes))
    if num_stages is not None and num_stages != len(sizes):
        raise PartitionError(
            f"[layers] {text} lists {len(sizes)} stages, but {num_stages} stages were asked for. Expected one entry "
            f"for each stage. List {num_stages} entries, or leave out --stages."
        )
    _check_num_stages(num_layers, len(sizes))
    if min(sizes) < 1 or sum(sizes) != num_layers:
        raise PartitionError(
            f"[layers] {text} covers {sum(sizes)} layers with {min(sizes)} in its smallest stage, but the model has "
            f"{num_layers} layers. Expected every layer in exactly one stage and at least one layer in each. "
            f"An even cut is {','.join(map(str, even(num_layers, len(sizes))))}."
        )
    return sizes


def ranges(sizes: Sequence[int]) -> tuple[range, ...]:
    """The layers of each stage, as ranges of whole-model numbers."""
    starts = [sum(sizes[:stage]) for stage in range(len(sizes))]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))


def sites(layers: range) -> range:
    """The sites that a stage of these layers runs; the first stage has the embedding, too."""
    return range(layers.start + 1 if layers.start else 0, layers.stop + 1)


def balanced(costs: Sequence[Sequence[float]], memory: Needs, limits: Sequence[float]) -> tuple[int, ...]:
    """The cut whose longest stage is as short as can be while every stage keeps its limit; exact.

    Of the cuts that are as good, the one with the least sum of squares of what stages cost, so that the others are
    close to each other as well. For stages that lie on ranks of their own: where a rank has several, what it needs is
    their sum, and this takes each limit as one stage's.

    Args:
        costs: For each stage, what each site would cost on it: `num_layers + 1` numbers.
        memory: Bytes that a stage needs for sites.
        limits: Bytes that each stage may need.

    Raises:
        PartitionError: If there are fewer layers than stages, or no cut keeps the limits.
    """
    num_layers = len(costs[0]) - 1
    sums = [list(accumulate(row, initial=0.0)) for row in costs]

    def cost(stage: int, layers: range) -> float:
        own = sites(layers)
        keeps = memory(stage, own) <= limits[stage]
        return sums[stage][own.stop] - sums[stage][own.start] if keeps else inf

    every = _every(num_layers, len(limits), cost)
    shortest = _least(every, max)
    if shortest is None:
        raise PartitionError(_does_not_fit(num_layers, memory, limits))
    bound = max(each[layers] for each, layers in zip(every, ranges(shortest), strict=True))
    squares = [{layers: c * c if c <= bound else inf for layers, c in each.items()} for each in every]
    return _least(squares, lambda a, b: a + b) or shortest


def roomiest(num_layers: int, memory: Needs, limits: Sequence[float]) -> tuple[int, ...]:
    """The cut whose fullest stage fills the least share of its limit, whether it fits or not; exact."""
    shares = _every(num_layers, len(limits), lambda stage, layers: memory(stage, sites(layers)) / limits[stage])
    return _least(shares, max) or even(num_layers, len(limits))


def _every(num_layers: int, num_stages: int, value: Callable[[int, range], float]) -> list[dict[range, float]]:
    """What each stage would come to with any layers that leave at least one for each other stage."""
    _check_num_stages(num_layers, num_stages)

    def ends(stages: int) -> range:
        """Where that many stages can end."""
        least = num_layers if stages == num_stages else stages
        return range(least, num_layers - num_stages + stages + 1) if stages else range(1)

    return [
        {range(a, b): value(stage, range(a, b)) for a in ends(stage) for b in ends(stage + 1) if a < b}
        for stage in range(num_stages)
    ]


def _least(every: Sequence[dict[range, float]], join: Callable[[float, float], float]) -> tuple[int, ...] | None:
    """The cut whose stages' values, joined, are the least; None if all are infinite.

    By dynamic programming: the best cut of the first stages, up to any layer, stays the best whatever comes after it,
    since `join` grows with both of its arguments.
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for values in every:
        further: dict[int, tuple[float, tuple[int, ...]]] = {}
        for layers, value in values.items():
            before, cut = best.get(layers.start, (inf, ()))
            if (total := join(before, value)) < further.get(layers.stop, (inf, ()))[0]:
                further[layers.stop] = total, (*cut, len(layers))
        best = further
    return next((cut for _, cut in best.values()), None)


def _does_not_fit(num_layers: int, memory: Needs, limits: Sequence[float]) -> str:
    sizes = roomiest(num_layers, memory, limits)
    needed = [memory(stage, sites(layers)) for stage, layers in enumerate(ranges(sizes))]
    stage = max(range(len(limits)), key=lambda s: needed[s] / limits[s])
    has = f"{needed[stage] / 1e9:.2f} GB of {limits[stage] / 1e9:.2f} GB"
    return (
        f"[layers] No cut of {num_layers} layers keeps every stage within its memory: in the closest, "
        f"{','.join(map(str, sizes))}, stage {stage} needs {has}. "
        "Use --recompute layer, a smaller batch or sequence, or more ranks."
    )


def _check_num_stages(num_layers: int, num_stages: int) -> None:
    if num_stages < 1:
        raise PartitionError(
            f"[stages] {num_stages} stages were asked for. Expected at least 1. Use --stages 1 or more."
        )
    if num_layers < num_stages:
        layers = f"{num_layers} layer" + "s" * (num_layers != 1)
        raise PartitionError(
            f"[stages] Cannot divide {layers} into {num_stages} stages: every stage needs at least one layer. "
            f"Use between 1 and {num_layers} stages."
        )
