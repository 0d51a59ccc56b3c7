"""Verdicts for people and for machines: a summary, JSON, JUnit, and one self-contained page."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from html import escape
from xml.etree import ElementTree

from pptrain.page import page
from pptrain.validate import Verdict

_CLASSES = {"ok": "good", "fails on one device": "neutral", "close": "doubtful", "cannot be cut here": "bad"}
"""The page's colours by verdict; the last need a look first."""

_STYLE = """
div { overflow-x: auto; }
th { white-space: nowrap; }
td:first-child { overflow-wrap: anywhere; white-space: normal; min-width: 9rem; }
td.why { overflow-wrap: anywhere; min-width: 20rem; }
details { font-size: 13px; }
ul { padding-left: 1.2rem; margin: .3rem 0; }
tr.good { background: var(--good); } tr.doubtful { background: var(--doubtful); }
tr.neutral { background: var(--neutral); } tr.bad { background: var(--bad); }
@media (max-width: 45rem) {
  tr:has(th) { display: none; }
  tr, td.why { display: block; } td { display: inline-block; border: 0; } tr { border-bottom: 1px solid var(--line); }
  td:nth-child(3)::after { content: " cuts"; } td:nth-child(4)::after { content: " runs"; }
  td:nth-child(5)::after { content: " s"; }
}
"""


def line(verdict: Verdict) -> str:
    """A verdict in one line, with what was not tried."""
    return str(replace(verdict, reason=f"{_not_tried(verdict)} {verdict.reason}".strip()))


def _not_tried(verdict: Verdict) -> str:
    """What the verdict is not about, as its notes say; empty if nothing."""
    found = [re.match(r"([\w ]+) (?:was|were) not tried: ", note) for note in verdict.notes]
    names = ", ".join(match[1] for match in found if match)
    return f"(not tried: {names})" if names else ""


def summary(verdicts: Sequence[Verdict]) -> str:
    """How many models have each verdict."""
    counts = Counter(verdict.word for verdict in verdicts)
    parts = [f"{counts[word]} {word}" for word in _CLASSES if counts[word]]
    return f"{len(verdicts)} models: {', '.join(parts)}"


def to_json(verdicts: Sequence[Verdict]) -> str:
    """A list of objects, one for each model."""
    return json.dumps([asdict(verdict) for verdict in verdicts], indent=1) + "\n"


def from_json(text: str) -> list[Verdict]:
    """What `to_json` wrote."""
    return [Verdict(**entry) for entry in json.loads(text)]


def to_junit(verdicts: Sequence[Verdict]) -> str:
    """One test case a model: a failure where it is `close` or cannot be cut, skipped where one device fails."""
    bad = [verdict for verdict in verdicts if not verdict.is_good]
    suite = ElementTree.Element("testsuite", name="pptrain validate", tests=str(len(verdicts)), failures=str(len(bad)))
    for verdict in verdicts:
        case = ElementTree.SubElement(suite, "testcase", name=verdict.name, time=f"{verdict.seconds:.3f}")
        if not verdict.is_good:
            failure = ElementTree.SubElement(case, "failure", message=f"{verdict.word}: {verdict.reason}")
            failure.text = "\n".join(verdict.notes)
        elif verdict.word != "ok":
            ElementTree.SubElement(case, "skipped", message=f"{verdict.word}: {verdict.reason}")
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def to_html(verdicts: Sequence[Verdict]) -> str:
    """One page: a row a model, coloured by its verdict, what needs a look first."""
    head = "".join(f'<th class="{kind}">{title}</th>' for title, kind in _COLUMNS)
    urgency = list(_CLASSES)
    rows = "\n".join(_row(verdict) for verdict in sorted(verdicts, key=lambda v: -urgency.index(v.word)))
    body = (
        f"<p>{escape(summary(verdicts))}. Every cut is compared with one device, bit by bit.</p>\n"
        f"<div><table>\n<tr>{head}</tr>\n{rows}\n</table></div>"
    )
    return page("pptrain validate", body, _STYLE)


_COLUMNS = (
    ("model", "word"),
    ("verdict", "word"),
    ("cuts", "number"),
    ("runs", "number"),
    ("seconds", "number"),
    ("where and why", "why"),
)


def _row(verdict: Verdict) -> str:
    notes = "".join(f"<li>{escape(note)}</li>" for note in verdict.notes)
    count = f"{len(verdict.notes)} note{'s' if len(verdict.notes) > 1 else ''}"
    more = f"<details><summary>{count}</summary><ul>{notes}</ul></details>" if notes else ""
    tried = (str(verdict.num_cuts), str(verdict.num_runs)) if verdict.num_runs else ("\u2013", "\u2013")
    word = f"{verdict.word} {_not_tried(verdict)}".strip()
    cells = (verdict.name, word, *tried, f"{verdict.seconds:.1f}", verdict.reason)
    *plain, why = (f'<td class="{kind}">{escape(cell)}' for cell, (_, kind) in zip(cells, _COLUMNS, strict=True))
    return f'<tr class="{_CLASSES[verdict.word]}">{"</td>".join(plain)}</td>{why}{more}</td></tr>'
