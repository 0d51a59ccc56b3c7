"""On what the contract is run, and with how many ranks: the tests take their cases from here.

`python tests/backends.py` prints the table in transports/README.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from transports.base import Lanes
from transports.contract import PROMISES, Promise
from transports.endings import ENDINGS


@dataclass(frozen=True, slots=True)
class Backend:
    """A transport, and the numbers of ranks with which each kind of promise is checked."""

    name: str
    lanes: Lanes
    checks_messages: bool
    world_sizes: tuple[int, ...]
    ending_sizes: tuple[int, ...] = ()
    heavy_sizes: tuple[int, ...] = ()
    refusal_sizes: tuple[int, ...] = ()
    """With which it is checked that a message of another form is refused, which ends a run."""

    def sizes(self, promise: Promise) -> tuple[int, ...]:
        """With how many ranks the tests check a promise; nothing where it is not made."""
        if not promise.concerns(self):
            return ()
        if promise.is_heavy:
            return self.heavy_sizes
        return self.refusal_sizes if promise.is_of_checks else self.world_sizes


LOOPBACKS = [
    Backend("loopback", "directional", True, (2, 3), (2, 3, 4), (2,), (2, 3)),
    Backend("loopback, single lane", "single", True, (2, 3), (2, 3, 4), (2,), (2, 3)),
]
RINGS = [
    Backend("ring", "directional", False, (2, 3), (3,), (2,)),
    Backend("ring, single lane", "single", False, (2, 3), (3,), (2,)),
    Backend("ring, checked", "directional", True, (2,), (), (), (2,)),
    Backend("ring, single lane, checked", "single", True, (3,), (), (), (2,)),
]


def table() -> str:
    """Promise by backend, in Markdown."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in _rows())


def _rows() -> Iterator[list[str]]:
    backends = LOOPBACKS + RINGS
    yield ["promise", *(backend.name for backend in backends)]
    yield ["---"] * (1 + len(backends))
    for promise in PROMISES:
        name = f"`{promise.name}`" + (", only if asked for" if promise.is_heavy else "")
        yield [name, *(_cell(backend.sizes(promise)) for backend in backends)]
    for ending in ENDINGS:
        yield [f"`{ending.name}`", *(_cell(backend.ending_sizes) for backend in backends)]


def _cell(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes)) or "-"


if __name__ == "__main__":
    print(table())
