"""Times the forward, the input part and the weight part of each kind of layer here, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import mlx.core as mx

from pptrain.executor import materialize
from pptrain.microbatch import Microbatch, kept_random_state
from pptrain.model import Specs
from pptrain.plan import Seconds
from pptrain.segment import Cut, Segment, Work
from pptrain.sizes import Sizes, specs_back, specs_into
from transports import Task, Transport
from transports.measure import LinkSpeed, measure_links

_ROUNDS = 3
"""The first warms up; of the others the fastest counts."""


def time_sites(
    cut: Cut, sizes: Sizes, rows: int, seq: int, clock: Callable[[], float] = perf_counter
) -> tuple[Seconds, ...]:
    """What every site takes on this machine; sites that are alike are timed once, one at a time in memory.

    Args:
        cut: The model.
        sizes: Of the same model, rows and seq.
        rows: Examples in a microbatch.
        seq: Tokens of a row.
        clock: Seconds.
    """
    known = dict[Any, Seconds]()
    for number, site in enumerate(sizes.sites):
        key = (site.parts, site.held, site.into_bytes)
        if key not in known:
            with kept_random_state():
                known[key] = _time_site(cut, number, rows, seq, clock)
    return tuple(known[site.parts, site.held, site.into_bytes] for site in sizes.sites)


def _time_site(cut: Cut, site: int, rows: int, seq: int, clock: Callable[[], float]) -> Seconds:
    segment = Segment(cut, range(site, site + 1))
    tokens, lengths = mx.random.randint(0, 2, (rows, seq + 1)), mx.array([[1, seq]] * rows)
    into, out = _random(specs_into(cut, site, tokens)), _random(specs_back(cut, site + 1, tokens))
    weights, frozen = ([_like(array) for array in arrays] for arrays in segment.parameters())
    work = Work(Microbatch(tokens, lengths), 0, mx.array(float(rows * seq)), 0, 0)
    materialize(tokens, lengths, work.num_tokens, into, out, weights, frozen)
    with segment.reading(weights, frozen):
        rounds = [_round(segment, work, into, out, clock) for _ in range(_ROUNDS)]
    forward, inputs, grads = (min(column) for column in zip(*rounds[1:], strict=True))
    return forward, inputs, grads


def _round(
    segment: Segment, work: Work, into: list[mx.array], out: list[mx.array], clock: Callable[[], float]
) -> Seconds:
    times = [clock()]
    if not segment.trains:
        materialize(segment.forward(work, into))
        return clock() - times[0], 0.0, 0.0
    output, graph = segment.differentiate(work, into, out)
    for part in (output, graph.input_cotangents if segment.passes_cotangent else [], graph.grads):
        materialize(part)
        times.append(clock())
    return times[1] - times[0], times[2] - times[1], times[3] - times[2]


def _random(specs: Specs) -> list[mx.array]:
    return [mx.random.normal(spec.shape).astype(spec.dtype) for spec in specs]


def _like(array: mx.array) -> mx.array:
    """Small random numbers, or random bits where weights are packed."""
    if mx.issubdtype(array.dtype, mx.floating):
        return (0.02 * mx.random.normal(array.shape)).astype(array.dtype)
    return mx.random.randint(0, 127, array.shape).astype(array.dtype)


Measured = tuple[tuple[tuple[Seconds, ...], ...], tuple[float, ...], list[LinkSpeed]]
"""Of every rank the seconds of each site and the memory; and of every link its speed."""


def share(transport: Transport, seconds: tuple[Seconds, ...], memory_bytes: float) -> Task[Measured]:
    """Tell all ranks what each measured by itself, and measure the links between them."""
    size, rank = transport.world_size, transport.rank
    mine = [value for site in seconds for value in site] + [memory_bytes]
    gathered = transport.all_sum(mx.array([mine if r == rank else [0.0] * len(mine) for r in range(size)]), "profile")
    yield gathered
    table: list[list[float]] = gathered.array.tolist()  # type: ignore[assignment]
    rows = tuple(tuple((row[i], row[i + 1], row[i + 2]) for i in range(0, len(row) - 1, 3)) for row in table)
    speeds = (yield from measure_links(transport)) if size > 1 else list[LinkSpeed]()
    return rows, tuple(row[-1] for row in table), speeds
