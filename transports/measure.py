"""How fast the links of a world are, measured by the ranks at both ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import mlx.core as mx
import numpy as np

from transports.base import Task, Transport
from transports.letters import MIB, around

SIZES = (MIB, 16 * MIB, 64 * MIB)


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """One direction of a link."""

    source: int
    to: int
    latency_seconds: float
    """Half of the time in which 4 bytes go there and 4 come back."""
    bytes_per_second: dict[int, float]
    """By the size of the messages in bytes; the time of one answer of 4 bytes is part of each measurement."""


def measure_links(transport: Transport, sizes: Sequence[int] = SIZES) -> Task[list[LinkSpeed]]:
    """Measure every link and direction, one after another while the others wait; every rank gets the whole table."""
    links = around(transport.world_size)
    rows: list[list[float]] = []
    for source, to in links:
        yield transport.barrier()
        seconds: list[float] = []
        for size in (4, *sizes):
            seconds.append((yield from _seconds_there_and_back(transport, (source, to), size)))
        rows.append(seconds)
    # Each row is filled by the link's source, and zero on all other ranks.
    gathered = transport.all_sum(mx.array(rows), "seconds")
    yield gathered
    table: list[list[float]] = np.asarray(gathered.array).tolist()
    return [_speed(*pair, sizes, row) for pair, row in zip(links, table, strict=True)]


def _speed(source: int, to: int, sizes: Sequence[int], seconds: Sequence[float]) -> LinkSpeed:
    # A virtual clock may stand still.
    rates = {size: size * _in_a_row(size) / max(each, 1e-9) for size, each in zip(sizes, seconds[1:], strict=True)}
    return LinkSpeed(source, to, seconds[0] / 2, rates)


def _in_a_row(size: int) -> int:
    """How many messages go before the answer: so many that its latency hardly counts, and one to measure latency."""
    return max(1, 32 * MIB // size) if size >= MIB else 1


def _seconds_there_and_back(transport: Transport, link: tuple[int, int], size: int) -> Task[float]:
    """The median time from the first send of this size to the arrival of an answer; 0 on ranks but the source."""
    source, to = link
    rounds, count = (20 if size < MIB else 3), _in_a_row(size)
    if transport.rank not in link:
        return 0.0
    message, answer = mx.zeros((size,), mx.uint8), mx.zeros((4,), mx.uint8)
    seconds: list[float] = []
    for _ in range(1 + rounds):
        began = transport.clock()
        if transport.rank == source:
            for _ in range(count):
                yield transport.send(message, to, "there")
            yield transport.arrive(transport.receive(answer.shape, mx.uint8, to, "back"))
        else:
            for _ in range(count):
                yield transport.arrive(transport.receive(message.shape, mx.uint8, source, "there"))
            yield transport.send(answer, source, "back")
        seconds.append(transport.clock() - began)
    return median(seconds[1:]) if transport.rank == source else 0.0  # The first round warms up.
