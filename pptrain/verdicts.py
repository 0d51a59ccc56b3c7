"""Verdicts for people and for machines: a summary, JSON, JUnit, and one self-contained page."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from xml.etree import ElementTree

from pptrain.page import page
from pptrain.validate import Verdict

_COLOURS = {"ok": "good", "close": "doubtful", "fails on one device": "neutral", "cannot be cut here": "bad"}
"""Variables of the page."""


def summary(verdicts: Sequence[Verdict]) -> str:
    """How many models have each verdict."""
    counts = Counter(verdict.word for verdict in verdicts)
    parts = [f"{counts[word]} {word}" for word in _COLOURS if counts[word]]
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
    """One page: a row a model, coloured by its verdict."""
    head = "".join(f"<th>{title}</th>" for title in ("model", "verdict", "cuts", "runs", "seconds", "where and why"))
    rows = "\n".join(_row(verdict) for verdict in verdicts)
    body = (
        f"<p>{escape(summary(verdicts))}. Every cut is compared with one device, bit by bit.</p>\n"
        f"<table>\n<tr>{head}</tr>\n{rows}\n</table>"
    )
    return page("pptrain validate", body, "details { font-size: 13px; }")


def _row(verdict: Verdict) -> str:
    notes = "".join(f"<li>{escape(note)}</li>" for note in verdict.notes)
    more = f"<details><summary>{len(verdict.notes)} notes</summary><ul>{notes}</ul></details>" if notes else ""
    numbers = (str(verdict.num_cuts), str(verdict.num_runs), f"{verdict.seconds:.1f}")
    cells = "".join(f'<td class="number">{number}</td>' for number in numbers)
    return (
        f'<tr style="background: var(--{_COLOURS[verdict.word]})"><td>{escape(verdict.name)}</td>'
        f'<td class="word">{verdict.word}</td>{cells}<td>{escape(verdict.reason)}{more}</td></tr>'
    )
