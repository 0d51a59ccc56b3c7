"""Arrays within Python structures: found, replaced, and what a call has changed in what it was given.

Dicts, lists, deques, tuples and plain objects are looked into; modules are not, since what they hold are parameters.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn


class Attributes(MutableMapping[str, Any]):
    """What an object holds, in its `__dict__` and in slots; of a frozen one, too."""

    def __init__(self, holder: Any) -> None:
        self._holder = holder
        kinds = [vars(kind).get("__slots__", ()) for kind in type(holder).__mro__]
        self._slots = [name for names in kinds for name in ([names] if isinstance(names, str) else names)]

    def __iter__(self) -> Iterator[str]:
        slots = [name for name in self._slots if not name.startswith("__") and hasattr(self._holder, name)]
        return iter([*getattr(self._holder, "__dict__", ()), *slots])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __getitem__(self, name: str) -> Any:
        return getattr(self._holder, name)

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._holder, name, value)

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self._holder, name)


Container = MutableMapping[Any, Any] | list[Any] | deque[Any]
"""What can be changed in place; of an object, its `Attributes`."""

_GONE = object()
"""Stands in an effect for what was taken out."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that a call hands on: what it returned, and what it put into the dicts, lists and objects given to it."""

    result: Any
    effects: tuple[tuple[int, Any, Any], ...] = ()
    """(number of the container, key, what stands there now): in the order of keys, but what was taken out from the last
    on.
    """

    @property
    def arrays(self) -> list[mx.array]:
        """Every array in it, in one order."""
        return arrays_in((self.result, [value for _, _, value in self.effects]))

    def rebuilt(self, replace: Callable[[Any], Any], kind: type = mx.array) -> Outcome:
        """The same with its leaves replaced."""
        replaced = rebuilt((self.result, [value for _, _, value in self.effects]), replace, kind)
        effects = zip(self.effects, replaced[1], strict=True)
        return Outcome(replaced[0], tuple((number, key, value) for (number, key, _), value in effects))

    def put(self, containers: Sequence[Container]) -> Any:
        """Let the effects happen to these containers, and return the result."""
        for number, key, value in self.effects:
            container = containers[number]
            if value is _GONE:
                if key in dict(_entries(container)):  # the call itself has taken it out where it was recorded
                    del container[key]
            elif isinstance(container, list | deque) and key >= len(container):
                container.append(value)
            else:
                container[key] = value
        return self.result


def arrays_in(tree: Any) -> list[mx.array]:
    """Every array, in the order of the structure; one that stands in two places comes twice."""
    return [node for node in _walk(tree, {}) if isinstance(node, mx.array)]


def containers_in(tree: Any) -> list[Container]:
    """Everything that can be changed in place, in the order of the structure."""
    return [inside for node in _walk(tree, {}) if isinstance(inside := _inside(node), MutableMapping | list | deque)]


def snapshot(containers: Iterable[Container]) -> list[dict[Any, Any]]:
    """What stands in each container now."""
    return [dict(_entries(container)) for container in containers]


def effects(containers: Sequence[Container], before: Sequence[dict[Any, Any]]) -> tuple[tuple[int, Any, Any], ...]:
    """What has been put into the containers since a snapshot, and what was taken out of them."""
    found = list[tuple[int, Any, Any]]()
    for number, (container, old) in enumerate(zip(containers, before, strict=True)):
        now = dict(_entries(container))
        found += [(number, key, value) for key, value in now.items() if old.get(key, _GONE) is not value]
        found += [(number, key, _GONE) for key in reversed(old) if key not in now]
    return tuple(found)


def rebuilt(tree: Any, replace: Callable[[Any], Any], kind: type = mx.array) -> Any:
    """A structure of the same form with its leaves of a kind replaced; what holds none stays the same object."""
    if isinstance(tree, kind):
        return replace(tree)
    if not any(isinstance(node, kind) for node in _walk(tree, {})):
        return tree
    inner = {key: rebuilt(child, replace, kind) for key, child in _entries(_inside(tree))}
    if isinstance(tree, dict):
        return inner
    if isinstance(tree, list | deque):
        return deque(inner.values(), tree.maxlen) if isinstance(tree, deque) else list(inner.values())
    if isinstance(tree, tuple):
        fields = getattr(tree, "_fields", None)
        return type(tree)(*inner.values()) if fields else tuple(inner.values())
    twin = copy.copy(tree)
    Attributes(twin).update(inner)
    return twin


def _inside(node: Any) -> Any:
    """The dict, list or tuple that holds a node's parts; None where there are none to look at."""
    if isinstance(node, nn.Module | mx.array | type | ModuleType):
        return None
    if isinstance(node, dict | list | deque | tuple):
        return node
    return None if callable(node) else Attributes(node) or None


def _entries(inside: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(inside, MutableMapping):
        return list(inside.items())
    return list(enumerate(inside)) if isinstance(inside, list | deque | tuple) else []


def _walk(node: Any, seen: dict[int, Any]) -> Generator[Any]:
    """Each node before what is in it; a container is entered once."""
    yield node
    inside = _inside(node)
    if inside is not None and id(node) not in seen:
        seen[id(node)] = node
        for _, child in _entries(inside):
            yield from _walk(child, seen)
