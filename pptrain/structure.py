"""Arrays within Python structures: found, replaced, and what a call has changed in what it was given.

Dicts, lists, tuples and plain objects are looked into; modules are not, since what they hold are parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

Container = dict[Any, Any] | list[Any]
"""What can be changed in place; of an object, its `__dict__`."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that a call hands on: what it returned, and what it put into the dicts, lists and objects given to it."""

    result: Any
    effects: tuple[tuple[int, Any, Any], ...] = ()
    """(number of the container, key, what stands there now)."""

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
            if isinstance(container, list) and key >= len(container):
                container.append(value)
            else:
                container[key] = value
        return self.result


def arrays_in(tree: Any) -> list[mx.array]:
    """Every array, in the order of the structure; one that stands in two places comes twice."""
    return [node for node in _walk(tree, {}) if isinstance(node, mx.array)]


def containers_in(tree: Any) -> list[Container]:
    """Everything that can be changed in place, in the order of the structure."""
    return [inside for node in _walk(tree, {}) if isinstance(inside := _inside(node), dict | list)]


def snapshot(containers: Iterable[Container]) -> list[dict[Any, Any]]:
    """What stands in each container now."""
    return [dict(_entries(container)) for container in containers]


def effects(containers: Sequence[Container], before: Sequence[dict[Any, Any]]) -> tuple[tuple[int, Any, Any], ...]:
    """What has been put into the containers since a snapshot."""
    missing = object()
    return tuple(
        (number, key, value)
        for number, (container, old) in enumerate(zip(containers, before, strict=True))
        for key, value in _entries(container)
        if old.get(key, missing) is not value
    )


def rebuilt(tree: Any, replace: Callable[[Any], Any], kind: type = mx.array) -> Any:
    """A structure of the same form with its leaves of a kind replaced; what holds none stays the same object."""
    if isinstance(tree, kind):
        return replace(tree)
    if not any(isinstance(node, kind) for node in _walk(tree, {})):
        return tree
    inner = {key: rebuilt(child, replace, kind) for key, child in _entries(_inside(tree))}
    if isinstance(tree, dict):
        return inner
    if isinstance(tree, list):
        return list(inner.values())
    if isinstance(tree, tuple):
        fields = getattr(tree, "_fields", None)
        return type(tree)(*inner.values()) if fields else tuple(inner.values())
    twin = copy.copy(tree)
    vars(twin).update(inner)
    return twin


def _inside(node: Any) -> Any:
    """The dict, list or tuple that holds a node's parts; None where there are none to look at."""
    if isinstance(node, nn.Module | mx.array | type | ModuleType):
        return None
    if isinstance(node, dict | list | tuple):
        return node
    return None if callable(node) else getattr(node, "__dict__", None)


def _entries(inside: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(inside, dict):
        return list(inside.items())
    return list(enumerate(inside)) if isinstance(inside, list | tuple) else []


def _walk(node: Any, seen: dict[int, Any]) -> Generator[Any]:
    """Each node before what is in it; a container is entered once."""
    yield node
    inside = _inside(node)
    if inside is not None and id(inside) not in seen:
        seen[id(inside)] = inside
        for _, child in _entries(inside):
            yield from _walk(child, seen)
