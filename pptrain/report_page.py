"""A training run as one page: what it was started with, its curves, the timeline of a step, every report."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from pptrain.chart import STYLE, Series, draw_chart
from pptrain.page import page, table
from pptrain.record import Record, Reports, Start
from pptrain.simulate import Span
from pptrain.svg import draw_svg
from pptrain.timeline import bubble_share

_SHOWN = 500
"""Reports in the table, the newest."""
_STYLE = f"""{STYLE}
.facts {{ display: flex; flex-wrap: wrap; gap: .5rem 2.2rem; margin: 1.2rem 0; }}
.facts div {{ min-width: 6rem; }} .facts .value {{ font-size: 1.35rem; font-variant-numeric: tabular-nums; }}
.timeline {{ width: 100%; height: auto; }} .wide {{ overflow-x: auto; }} .wide svg {{ min-width: 44rem; }}
"""


@dataclass(frozen=True, slots=True)
class History:
    """All that there is to show of a run.

    Attributes:
        directory: Its name.
        as_of: When its last report was written, in words.
        record: What it was started with, if it says.
        reports: What it reported.
        spans: What each rank ran in the last step, in seconds; empty if there is no trace.
    """

    directory: str
    as_of: str
    record: Record | None
    reports: Reports
    spans: Mapping[int, Sequence[Span]]


def to_html(history: History) -> str:
    """The page."""
    record, reports = history.record, history.reports
    model = f" of {record.model}" if record else ""
    parts = [
        f'<p class="quiet">{escape(f"{history.directory}{model}, as of {history.as_of}")}</p>',
        f"<p>{escape(_state(record, reports))}</p>",
        _facts(reports),
        "<h2>Command</h2>",
        _command(record),
        "<h2>Curves</h2>",
        _curves(record, reports),
        "<h2>The last step</h2>",
        _timeline(record, history.spans),
        _settings(record),
        _table(reports),
    ]
    return page("Training run", "\n".join(part for part in parts if part), _STYLE)


def _state(record: Record | None, reports: Reports) -> str:
    """How far the run is; whether its process is there cannot be seen from its files."""
    done = max((report["iteration"] for report in reports.train), default=0)
    if not reports.train and not reports.valid:
        said = "Nothing has been reported yet."
    elif record is None:
        said = f"{done:,} iterations are reported."
    elif done >= record.iters:
        said = f"All {record.iters:,} iterations are trained."
    else:
        said = f"{done:,} of {record.iters:,} iterations are reported; the run goes on, or was stopped."
    return f"{said} The last line is being written, or was cut off by a kill." if reports.is_cut_off else said


def _facts(reports: Reports) -> str:
    """The numbers that one looks for first."""
    last = reports.train[-1] if reports.train else {}
    losses = [loss for report in reports.valid if (loss := _number(report, "val_loss")) is not None]
    values = {
        "training loss": _in_words(last.get("train_loss"), ".3f"),
        "validation loss": f"{losses[-1]:.3f}" if losses else "none yet",
        "lowest validation loss": f"{min(losses):.3f}" if losses else "none yet",
        "tokens trained": _in_words(last.get("trained_tokens"), ",.0f"),
        "tokens/s": _in_words(last.get("tokens_per_second"), ",.0f"),
        "peak memory": _in_words(last.get("peak_memory"), ".3f", " GB"),
    }
    tiles = (f'<div><div class="value">{escape(v)}</div><div class="quiet">{k}</div></div>' for k, v in values.items())
    return f'<div class="facts">{"".join(tiles)}</div>'


def _in_words(value: Any, form: str, unit: str = "") -> str:
    return format(value, form) + unit if isinstance(value, int | float) else "none yet"


def _number(report: Mapping[str, Any], name: str) -> float | None:
    """A value, or None where it is not there or was not finite."""
    value = report.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _command(record: Record | None) -> str:
    if record is None:
        return "<p>This directory has no run.json, so the command and the settings are not known.</p>"
    starts, where = record.starts, f"{record.num_ranks} ranks over {record.transport}"
    shown = [f"<pre>{escape(_line(start))}</pre>" for start in starts[-1:]]
    if len(starts) > 1:
        rows = [(_when(start), f"{start.iteration:,}", _line(start)) for start in starts]
        listed = table(("began", "after iteration", "command"), rows)
        shown.append(f"<details><summary>{len(starts)} processes trained it, one after the other</summary>{listed}")
        shown.append("</details>")
    began = f"{where}; the last process began {_when(starts[-1])}." if starts else f"{where}."
    return "\n".join([*shown, f'<p class="quiet">{escape(began)}</p>'])


def _when(start: Start) -> str:
    return start.time.replace("T", " ").replace("+00:00", " UTC")


def _line(start: Start) -> str:
    return shlex.join(start.command) if start.command else "not started from a command line"


def _curves(record: Record | None, reports: Reports) -> str:
    train, valid = reports.train, reports.valid
    marks = [start.iteration for start in record.starts if start.iteration] if record else []
    losses = [_series("training", train, "train_loss"), _series("validation", valid, "val_loss")]
    charts = [
        draw_chart("Loss", [each for each in losses if each.points], marks),
        *(
            draw_chart(title, [_series(title, train, name)], marks, zero=zero)
            for title, name, zero in (
                ("Learning rate", "learning_rate", True),
                ("Gradient norm", "grad_norm", True),
                ("Tokens/s", "tokens_per_second", True),
            )
        ),
        draw_chart("Peak memory of each rank, GB", _memory(train), marks, zero=True),
    ]
    notes = [] if valid or not train else ["No validation has been reported yet."]
    if marks:
        notes.append("Dotted: a new process went on from a checkpoint here.")
    if gaps := sum(_number(report, "train_loss") is None for report in train):
        notes.append(f"Reports without a finite loss, which are gaps in the curve: {gaps}.")
    drawn = "\n".join(chart for chart in charts if chart)
    shown = f'<div class="charts">\n{drawn}\n</div>' if drawn else "<p>There is nothing to draw yet.</p>"
    return shown + "".join(f'<p class="quiet">{note}</p>' for note in notes)


def _series(name: str, reports: Sequence[Mapping[str, Any]], key: str) -> Series:
    """The values of a key; a validation stands at the iteration before it, as it is reported."""
    values = ((report["iteration"], _number(report, key)) for report in reports if key in report)
    return Series(name, tuple((at, math.nan if value is None else value) for at, value in values))


def _memory(reports: Sequence[Mapping[str, Any]]) -> list[Series]:
    peaks = [(r["iteration"], r["peak_memory_by_rank"]) for r in reports if r.get("peak_memory_by_rank")]
    count = max((len(each) for _, each in peaks), default=0)
    rows = [tuple((at, each[rank]) for at, each in peaks if rank < len(each)) for rank in range(count)]
    return [Series(f"rank {rank}", row) for rank, row in enumerate(rows)]


def _timeline(record: Record | None, spans: Mapping[int, Sequence[Span]]) -> str:
    if any(spans.values()):
        ends = [span.end for row in spans.values() for span in row]
        length = max(ends) - min(span.start for row in spans.values() for span in row)
        schedule = f"{_setting(record, 'schedule')}, " if _setting(record, "schedule") else ""
        title = f"{schedule}{len(spans)} ranks, {length * 1e3:,.1f} ms, bubble {bubble_share(spans):.1%}"
        return f'<div class="wide">{draw_svg(spans, title)}</div>'
    if record is not None and record.trace is not None:
        return f"<p>No trace yet: {escape(record.trace)} is written when the run has ended.</p>"
    return "<p>No trace: <code>pptrain train --trace FILE</code> writes one when the run has ended.</p>"


def _setting(record: Record | None, name: str) -> str:
    """A setting's value, without the quotes of JSON around text."""
    text = record.settings.get(name, "") if record else ""
    try:
        value: Any = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, str) else text


def _settings(record: Record | None) -> str:
    if record is None:
        return ""
    rows = [(name, _setting(record, name)) for name in sorted(record.settings)]
    listed = table(("setting", "value"), rows)
    return f"<h2>Settings</h2>\n<details><summary>{len(rows)} that all ranks agreed on</summary>{listed}</details>"


def _table(reports: Reports) -> str:
    if not reports.train:
        return ""
    losses = {report["iteration"] + 1: report for report in reports.valid}
    columns = {
        "training loss": ("train_loss", ".4f"),
        "learning rate": ("learning_rate", ".3e"),
        "gradient norm": ("grad_norm", ".4g"),
        "tokens/s": ("tokens_per_second", ",.0f"),
        "tokens": ("trained_tokens", ",.0f"),
    }

    def row(report: Mapping[str, Any]) -> list[str]:
        numbers = [_in_cell(report.get(key), form) for key, form in columns.values()]
        peaks = " ".join(f"{peak:.3f}" for peak in report.get("peak_memory_by_rank") or ())
        valid = _in_cell(losses.get(report["iteration"], {}).get("val_loss"), ".4f")
        return [f"{report['iteration']:,}", *numbers, valid, peaks]

    shown = reports.train[-_SHOWN:]
    head = ("iteration", *columns, "validation loss before it", "peak memory, GB")
    which = f"the last {_SHOWN} of {len(reports.train):,}" if len(shown) < len(reports.train) else f"all {len(shown):,}"
    listed = table(head, [row(report) for report in reversed(shown)], numbers=len(head))
    return f'<h2>Reports</h2>\n<details><summary>{which}</summary><div class="wide">{listed}</div></details>'


def _in_cell(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else ""
