"""How many layers show an architecture's pattern twice: what differs from layer to layer, and with which period."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Hashable, Iterable, Sequence
from itertools import groupby
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from pptrain.model import find_layers

FEWEST, MOST = 4, 16
"""Layers of a tiny model: enough for three stages of which one has two; few enough for its cuts to be tried."""

Fact = tuple[str, Hashable]
"""Something that is so for a layer: where it stands, and what."""


def layers_to_show(kinds: Sequence[Hashable]) -> list[int]:
    """The fewest layers that show what repeats twice, with what comes before and after it, cut short at its end or not.

    What comes after it is at the same place of a period as it was. Where nothing repeats at least three times, or
    where that takes more than `MOST`, they are the first `MOST` or all.
    """
    total = len(kinds)
    shown = list(range(total))
    for period in range(1, total // 3 + 1):
        same = [a == b for a, b in zip(kinds, kinds[period:], strict=False)]
        for start, stop in _runs(same):
            repeated = stop - start + period
            left_out = max(0, min(repeated // period - 2, (total - FEWEST) // period)) * period
            if total - left_out < len(shown):
                end = start + repeated - left_out
                shown = [*range(end), *range(end + left_out, total)]
    return shown if len(shown) <= MOST else shown[:MOST]


def kinds_of(model: nn.Module) -> list[frozenset[Fact]]:
    """What each layer is: its modules' classes, shapes and own attributes, and what lists around the layers say of it.

    What counts the layers (their numbers, scalings that depend on these) is left out: it has no pattern. Lists of a
    config, which may say what nobody reads, are looked at only where the layers themselves look alike.
    """
    layers = find_layers(model)
    around = _around(model, layers)
    facts = _without_counts([dict(_own(layer)) for layer in layers], _lists(around, len(layers)))
    if len(set(facts)) == 1:
        configs = [(where, vars(value)) for where, value in around if dataclasses.is_dataclass(value)]
        inside = [(f"{where}.{key}", value) for where, values in configs for key, value in values.items()]
        facts = _without_counts([dict(fact) for fact in facts], _lists(inside, len(layers)))
    return facts


def _without_counts(
    facts: Sequence[dict[str, Hashable]], lists: Iterable[tuple[str, Sequence[Any]]]
) -> list[frozenset[Fact]]:
    for where, values in lists:
        for fact, value in zip(facts, values, strict=True):
            fact[where] = value
    keys = dict.fromkeys(key for fact in facts for key in fact)
    counts = {key for key in keys if len({fact.get(key) for fact in facts}) > len(facts) / 2}
    return [frozenset((key, value) for key, value in fact.items() if key not in counts) for fact in facts]


def _runs(same: Iterable[bool]) -> Generator[tuple[int, int]]:
    place = 0
    for value, group in groupby(same):
        length = len(list(group))
        if value:
            yield place, place + length
        place += length


def _own(layer: nn.Module) -> Generator[Fact]:
    for path, module in layer.named_modules():
        yield path, type(module).__name__
        for key, value in [*module.items(), *vars(module).items()]:
            if isinstance(value, mx.array):
                yield f"{path}.{key}", (*value.shape, str(value.dtype))
            elif _is_plain(value):
                yield f"{path}.{key}", value


def _around(model: nn.Module, layers: Sequence[nn.Module]) -> list[tuple[str, Any]]:
    """The attributes of all modules outside of the layers."""
    inside = {id(module) for layer in layers for module in layer.modules()}
    return [
        (f"{path}.{key}", value)
        for path, module in model.named_modules()
        if id(module) not in inside
        for key, value in [*module.items(), *vars(module).items()]
    ]


def _lists(attributes: Iterable[tuple[str, Any]], length: int) -> Generator[tuple[str, Sequence[Any]]]:
    """Those that are lists with one plain entry for each layer."""
    for where, value in attributes:
        if isinstance(value, list | tuple) and len(value) == length and all(map(_is_plain, value)):
            yield where, value


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)
