"""What a layer hands on by a way that is not seen: a variable of its own that others read, or a closure it returns.

A stage that does not run the layer would read what another microbatch has left there, or miss it. So the forward is
built a few more times, some sites run and the others played, until of any two sites each was played once while the
other ran. What is made then must be computed from all that the trace says, and from no array of a forward before.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Iterable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from pptrain.errors import ModelError, PptrainError
from pptrain.lazy import handle, mentions
from pptrain.model import find_slots, intercepted, replaced
from pptrain.replay import Replay
from pptrain.structure import arrays_in
from pptrain.values import Call, Trace

_OLD, _VALUE = "old:", "value:"
"""Start the names of arrays of forwards before, and of values; no parameter's name has a colon."""

Made = list[tuple[str, list[mx.array]]]
"""Arrays, beside who made them as errors call it."""


def refuse_unseen(model: nn.Module, trace: Trace, tokens: mx.array) -> None:
    """Build forwards of which parts are played, evaluating nothing.

    Args:
        model: The model.
        trace: What was seen of it.
        tokens: With which.

    Raises:
        ModelError: If something reads what a layer has made, and the trace has not seen how it got there.
    """
    slots = find_slots(model)
    parameters = {name: slot.array for name, slot in slots.items()}
    old = [handle(tokens), *trace.stand_ins]
    for sites in _choices(trace.num_positions + 1):
        given = mx.zeros(tokens.shape, tokens.dtype)
        known = {v: mx.zeros(a.shape, a.dtype) for v, a in enumerate(trace.stand_ins) if not _runs(trace, v, sites)}
        own = {f"{_VALUE}{v}": handle(array) for v, array in known.items()}
        mine = handle(given)
        with replaced(list(slots.values()), list(parameters.values())):  # a forward may put others in their place
            made = _built(model, given, Replay(trace, sites, known, trace.num_positions + 1), trace)
        _check(model, made, _expected(trace, sites), {**parameters, **own}, old)
        old += [mine, *own.values()]


def _choices(num_sites: int) -> Generator[Container[int]]:
    """All sites; then those whose number has a binary digit, and those that have it not: any two differ in one."""
    yield range(num_sites)
    for digit in range((num_sites - 1).bit_length()):
        for kind in (0, 1):
            yield frozenset(site for site in range(num_sites) if site >> digit & 1 == kind)


def _runs(trace: Trace, value: int, sites: Container[int]) -> bool:
    return trace.values[value].site in sites


def _built(model: nn.Module, tokens: mx.array, replay: Replay, trace: Trace) -> Made:
    """What one forward makes: layers that are run, what is between them, and at the end the logits."""
    made, calls = Made(), iter(trace.calls)
    replay.seed_of = lambda site: 0

    def around(number: int, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            note((result, args, kwargs))
            return result

        def note(tree: Any) -> None:
            made.append((trace.units[number].name, [handle(array) for array in arrays_in(tree)]))

        note(_introduced(next(calls, None), arrays_in((args, kwargs))))
        return replay.around(number, noted, *args, **kwargs)

    try:
        with intercepted(replay.modules, around):
            logits = model(tokens)
    except PptrainError:
        raise
    except Exception as error:  # a model's own code may raise anything where it misses what a layer would have done
        raise ModelError(_unseen(model, "its forward")) from error
    replay.forget()
    return [*made, ("what comes after the layers", [logits])]


def _introduced(call: Call | None, arrays: Iterable[mx.array]) -> list[mx.array]:
    """Of what a layer is given, what was made outside of layers and is seen here first."""
    if call is None or call.layer is None:  # all that a module between layers makes is noted
        return []
    return [array for array, value in zip(arrays, call.given, strict=False) if value in call.introduced]


def _expected(trace: Trace, sites: Container[int]) -> dict[str, str]:
    """Parameters and values of sites that are not run, beside who reads them: what is made is computed from these."""
    outside = {v for call in trace.calls for v in call.introduced}
    found = dict[str, str]()
    for number in [v for v in range(len(trace.values)) if v in outside or _runs(trace, v, sites)]:
        value = trace.values[number]
        needs = [f"{_VALUE}{v}" for v in value.needs if not _runs(trace, v, sites)]
        found |= dict.fromkeys([*value.reads, *needs], _name(trace, value.site))
    needs = [f"{_VALUE}{v}" for v in trace.tail.needs if not _runs(trace, v, sites)]
    return found | dict.fromkeys([*trace.tail.reads, *needs], "what comes after the layers")


def _name(trace: Trace, site: int) -> str:
    layers = [call.layer for call in trace.calls if call.position == site - 1 and call.layer is not None]
    return f"layer {layers[0]}" if layers else "what comes before the layers"


def _check(
    model: nn.Module, made: Made, expected: Mapping[str, str], leaves: Mapping[str, mx.array], old: list[mx.array]
) -> None:
    before = {f"{_OLD}{number}": array for number, array in enumerate(old)}
    found = _origins(made, {**before, **{name: leaves[name] for name in expected}})
    if before.keys() & found:
        raise ModelError(_unseen(model, next(who for who, arrays in made if _origins([(who, arrays)], before))))
    for name, reader in expected.items():
        if name not in found:
            raise ModelError(_unseen(model, reader))


def _origins(made: Made, leaves: Mapping[str, mx.array]) -> set[str]:
    end = mx.depends(mx.array(0), [array for _, arrays in made for array in arrays])
    return {name for name, _ in mentions(end, leaves)[1]}


def _unseen(model: nn.Module, reader: str) -> str:
    return (
        f"[model] {type(model).__module__} cannot be cut: {reader} reads what a layer has made and not handed on: "
        "neither returned, nor put into a dict, list or object that it was given. A stage that does not run the layer "
        "would miss it, or read what it made of other tokens. Expected layers that hand on all that is read elsewhere. "
        "Let the layer return it."
    )
