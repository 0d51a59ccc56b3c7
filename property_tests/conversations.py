"""Random conversations, and the plainest model of what each rank gets: a list for each link.

A conversation is one list of steps; each rank follows it at its own end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
from hypothesis import strategies as st

from transports import Receive, Sum, Task, Transport
from transports.buffers import bytes_of
from transports.contract import DTYPES, Letter

Record = list[bytes]


@dataclass(frozen=True)
class Together:
    """A step of all ranks: a sum."""

    salt: int


Step = Letter | Together


@st.composite
def letters(draw: st.DrawFn, world_size: int, dtypes: Sequence[mx.Dtype] = DTYPES) -> Letter:
    source, to = draw(st.permutations(range(world_size)))[:2]
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    return Letter(source, to, shape, draw(st.sampled_from(dtypes)), draw(st.integers(0, 9)))


@st.composite
def conversations(draw: st.DrawFn) -> tuple[int, list[Step]]:
    world_size = draw(st.integers(2, 4))
    together = st.builds(Together, st.integers(0, 9))
    return world_size, draw(st.lists(letters(world_size) | letters(world_size) | together, max_size=24))


def addend(step: Together, rank: int) -> mx.array:
    return mx.arange(3) * (rank + 1) + step.salt


def model(world_size: int, steps: Sequence[Step]) -> list[Record]:
    """What each rank gets, in the order of the conversation."""
    records: list[Record] = [[] for _ in range(world_size)]
    for step in steps:
        if isinstance(step, Letter):
            records[step.to].append(bytes_of(step.values()).tobytes())
        else:
            total = sum((addend(step, rank) for rank in range(world_size)), start=mx.array(0))
            for record in records:
                record.append(bytes_of(total).tobytes())
    return records


def at_once(transport: Transport, steps: Sequence[Step]) -> Task[Record]:
    """Wait for each step before the next."""
    record: Record = []
    for step in steps:
        if isinstance(step, Together):
            total = transport.all_sum(addend(step, transport.rank))
            yield total
            record.append(bytes_of(total.array).tobytes())
        elif step.source == transport.rank:
            yield transport.send(step.values(), step.to)
        elif step.to == transport.rank:
            receive = transport.receive(step.shape, step.dtype, step.source)
            yield transport.arrive(receive)
            record.append(bytes_of(receive.array).tobytes())
    return record


def all_posted_first(transport: Transport, steps: Sequence[Step]) -> Task[Record]:
    """Ask for everything, then wait for it from the last step to the first."""
    got, waits = list[Receive | Sum](), list()
    for step in steps:
        if isinstance(step, Together):
            got.append(transport.all_sum(addend(step, transport.rank)))
            waits.append(got[-1])
        elif step.source == transport.rank:
            waits.append(transport.send(step.values(), step.to))
        elif step.to == transport.rank:
            got.append(transport.receive(step.shape, step.dtype, step.source))
            waits.append(transport.arrive(got[-1]))
    yield from waits[::-1]
    return [bytes_of(each.array).tobytes() for each in got]
