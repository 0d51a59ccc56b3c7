"""A loopback whose ranks speak through a transport that may lie.

A liar stands between a rank's program and an honest loopback. The world wraps the programs, so that a liar is asked
before its rank waits for something, and told when that is over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import mlx.core as mx

from transports import LoopbackWorld, Receive, Task, Transport, TransportClosed, TransportError, Wait, World
from transports.links import Link

T = TypeVar("T")


def or_nothing(act):
    """What an act makes; nothing, and no error, where it comes too late."""
    try:
        return act()
    except TransportClosed:
        return None


class Honest(Transport):
    """Hands everything on; a liar changes what it lies about."""

    world_size_for_this = 2
    capacity: int | None = None
    link: type[Link] = Link
    checks_messages = True

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.rank, self.world_size, self.lanes = inner.rank, inner.world_size, inner.lanes

    def send(self, array, to, label=""):
        return self.inner.send(array, to, label)

    def receive(self, shape, dtype, source, label=""):
        return self.inner.receive(shape, dtype, source, label)

    def arrive(self, receive):
        return self.inner.arrive(receive)

    def all_sum(self, array, label=""):
        return self.inner.all_sum(array, label)

    def flush(self):
        return self.inner.flush()

    def clock(self):
        return self.inner.clock()

    def stand_at(self, position):
        self.inner.stand_at(position)

    def close(self):
        self.inner.close()

    def begin_wait(self, wait: Wait) -> Wait:
        """The rank begins to wait for this; returns what the loopback is to wait for."""
        return wait

    def end_wait(self, wait: Wait) -> None:
        """What the rank waited for is over."""

    def fail_wait(self, error: TransportError) -> TransportError | None:
        """What the rank waited for ended so; returns what the rank is told, None for that all went well."""
        return error


class LiarWorld(World):
    """A loopback whose ranks all speak through a liar of one kind."""

    def __init__(self, liar: type[Honest], world_size: int | None = None, lanes: str = "directional", **kwargs) -> None:
        self.world_size = world_size or liar.world_size_for_this
        self.inner = LoopbackWorld(self.world_size, **{"capacity": liar.capacity, "lanes": lanes} | kwargs)
        if liar.link is not Link:
            self.inner._links = {pair: liar.link(liar.capacity) for pair in self.inner._links}
        self.local_ranks = self.inner.local_ranks
        self.liars = [liar(self.inner.transport(rank)) for rank in self.local_ranks]

    def transport(self, rank: int) -> Honest:
        return self.liars[rank]

    def run(self, tasks: Mapping[int, Task[T]]) -> dict[int, T]:
        return self.inner.run({rank: _between(self.liars[rank], task) for rank, task in tasks.items()})

    def close(self) -> None:
        for liar in self.liars:
            liar.close()


def _between(liar: Honest, task: Task[T]) -> Task[T]:
    has_failed = False
    try:
        wait = next(task)
        while True:
            try:
                if not has_failed:  # Nothing goes on in a world that has ended; what waits there is what the liar says.
                    yield liar.begin_wait(wait)
            except TransportError as error:
                has_failed, told = True, liar.fail_wait(error)
                wait = next(task) if told is None else task.throw(told)
            else:
                liar.end_wait(wait)
                wait = next(task)
    except StopIteration as end:
        return end.value


class Later(Wait):
    """The wait of a send that is held back."""

    def __init__(self, array: mx.array, to: int, label: str) -> None:
        self.message = array, to, label

    def describe(self) -> str:
        return "a message that is held back"


class HoldsBack(Honest):
    """Sends when its rank next waits or sums, which is honest as long as it keeps the value; others lie from here."""

    def __init__(self, inner):
        super().__init__(inner)
        self.held = list[Later]()

    def keep(self, array: mx.array) -> mx.array:
        own = mx.array(array)
        mx.eval(own)
        return own

    def release(self) -> None:
        for later in self.held:
            super().send(*later.message)
        self.held.clear()

    def send(self, array, to, label=""):
        super().receive((1,), mx.float32, to)  # Refuses a rank that no link leads to.
        self.held.append(Later(self.keep(array), to, label))
        return self.held[-1]

    def all_sum(self, array, label=""):
        self.release()
        return super().all_sum(array, label)

    def flush(self):
        self.release()
        return super().flush()

    def close(self):
        self.release()
        super().close()

    def begin_wait(self, wait):
        self.release()
        return self.inner.flush() if isinstance(wait, Later) else wait


@dataclass(eq=False)
class Through(Receive):
    """What the rank takes for its receive; `inner` is the loopback's."""

    array: mx.array
    inner: Receive
    wait: Wait | None = field(default=None)
