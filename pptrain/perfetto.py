"""When actions ran, in the Chrome trace format: open the file at https://ui.perfetto.dev or in chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pptrain.errors import NotationError
from pptrain.schedule import Action, Kind
from pptrain.simulate import Span

_NAMES = {"F": "forward", "B": "backward", "I": "input part", "W": "weight part"}


def chrome_trace(spans: Mapping[int, Sequence[Span]], seconds: float = 1.0) -> str:
    """The JSON text of a trace.

    Args:
        spans: What each rank ran, all on one clock.
        seconds: How long a unit of the spans is; a trace counts microseconds.
    """
    begin = min((span.start for row in spans.values() for span in row), default=0.0)
    events = [_name(rank) for rank in sorted(spans)]
    events += [_event(rank, span, begin, seconds * 1e6) for rank in sorted(spans) for span in spans[rank]]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=0) + "\n"


def read_trace(text: str) -> dict[int, list[Span]]:
    """What each rank ran, in seconds, from a trace that `chrome_trace` made.

    Raises:
        NotationError: If it is no such trace.
    """
    spans = dict[int, list[Span]]()
    try:
        for event in json.loads(text)["traceEvents"]:
            row = spans.setdefault(event["tid"], [])
            if event["ph"] == "X":
                row.append(_span(event))
    except (ValueError, KeyError, TypeError) as error:
        raise NotationError(
            f"[trace] This is no trace of pptrain's: {type(error).__name__}: {error}. Expected what pptrain train "
            "--trace writes. Train with --trace again."
        ) from error
    return spans


def _span(event: Mapping[str, Any]) -> Span:
    kinds: dict[str, Kind] = {_NAMES[kind]: kind for kind in get_args(Kind)}
    place, begin = event["args"], event["ts"] / 1e6
    return Span(Action(place["stage"], kinds[place["kind"]], place["microbatch"]), begin, begin + event["dur"] / 1e6)


def _name(rank: int) -> dict[str, Any]:
    return {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}


def _event(rank: int, span: Span, begin: float, unit: float) -> dict[str, Any]:
    action = span.action
    return {
        "name": str(action),
        "cat": _NAMES[action.kind],
        "ph": "X",
        "pid": 0,
        "tid": rank,
        "ts": round((span.start - begin) * unit, 3),
        "dur": round((span.end - span.start) * unit, 3),
        "args": {"stage": action.stage, "microbatch": action.microbatch, "kind": _NAMES[action.kind]},
    }
