"""One self-contained page of HTML: no script, nothing from elsewhere, light or dark as the reader's system is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

SERIES = 8
"""Colours of lines that can be told apart; `--series-0` and so on."""

_LIGHT = ("#2563c9", "#c2410c", "#15803d", "#8b3fa8", "#8a6a00", "#0e7490", "#be185d", "#57606a")
_DARK = ("#6ea8fe", "#fb923c", "#4ade80", "#d08bea", "#e5c04b", "#4cc9de", "#f472b6", "#a9b2bd")
_STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1f2328; --quiet: #59636e; --line: #d8dee4; --back: #f3f5f7;
  --good: #d9f2dd; --doubtful: #fff0c2; --bad: #f9d4d1; --neutral: #e6e6ea; LIGHT }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171b; --text: #e3e7eb; --quiet: #9aa4af; --line: #343b43; --back: #1f242a;
    --good: #16391f; --doubtful: #443713; --bad: #4c2120; --neutral: #2b3036; DARK }
}
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem;
  background: var(--page); color: var(--text); }
h1 { font-size: 1.6rem; margin: 0 0 .2rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; }
p.quiet, .quiet { color: var(--quiet); }
pre { background: var(--back); padding: .7rem .9rem; border-radius: 6px; white-space: pre-wrap;
  overflow-wrap: anywhere; font: 13px/1.5 ui-monospace, monospace; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .35rem .7rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th.number, td.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.word { white-space: nowrap; }
summary { cursor: pointer; }
"""


def page(title: str, body: str, style: str = "") -> str:
    """A whole page.

    Args:
        title: Of the window, and the heading.
        body: HTML below the heading.
        style: CSS besides the common one.
    """
    common = _STYLE.replace("LIGHT", _variables(_LIGHT)).replace("DARK", _variables(_DARK))
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{common}{style}</style>\n</head>\n"
        f"<body>\n<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: int = 0) -> str:
    """A table of text, the last so many columns being numbers."""
    first = len(head) - numbers

    def line(tag: str, cells: Sequence[str]) -> str:
        opened = [f'{tag} class="number"' if at >= first else tag for at in range(len(cells))]
        return "".join(f"<{begin}>{escape(cell)}</{tag}>" for begin, cell in zip(opened, cells, strict=True))

    return (
        f"<table>\n<tr>{line('th', head)}</tr>\n"
        + "\n".join(f"<tr>{line('td', row)}</tr>" for row in rows)
        + "\n</table>"
    )


def _variables(colours: Sequence[str]) -> str:
    return " ".join(f"--series-{number}: {colour};" for number, colour in enumerate(colours))
