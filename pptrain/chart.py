"""Curves over iterations as SVG for a page: one line a series, its values where the pointer rests, no script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise, takewhile

from pptrain.page import SERIES

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 560.0, 240.0, 62.0, 14.0, 34.0, 34.0
_DOTTED = 40
"""Up to so many points are marked one by one."""
_BUCKETS = 250
"""A line of more points shows the least and the greatest of each of so many parts."""

STYLE = """
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr)); gap: .4rem 1.5rem; }
.chart { width: 100%; height: auto; }
.chart text { font: 11px system-ui, sans-serif; fill: var(--quiet); }
.chart .title { font-size: 13px; font-weight: 600; fill: var(--text); }
.chart .grid { stroke: var(--line); } .chart .mark { stroke: var(--quiet); stroke-dasharray: 2 4; }
.chart .curve { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.chart .hit { fill: transparent; stroke: none; } .chart .hit:hover { fill: var(--text); fill-opacity: .35; }
"""

Point = tuple[float, float]
"""An iteration and a value."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart; a value that is not finite is a gap in it."""

    name: str
    points: tuple[Point, ...]

    @property
    def finite(self) -> tuple[Point, ...]:
        """What can be drawn."""
        return tuple(point for point in self.points if math.isfinite(point[1]))


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to places."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        """The place of a value."""
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)


def draw_chart(title: str, series: Sequence[Series], marks: Sequence[float] = (), *, zero: bool = False) -> str:
    """The picture's text; empty if there is no value to draw.

    Args:
        title: Says what is drawn, and its unit.
        series: At least one.
        marks: Iterations to draw an upright line at.
        zero: Whether the axis begins at 0.
    """
    values = [value for each in series for _, value in each.finite]
    if not values:
        return ""
    iterations = [iteration for each in series for iteration, _ in each.points]
    ticks = round_steps(min(0.0, *values) if zero else min(values), max(values))
    y = Scale(ticks[0], ticks[-1], _HEIGHT - _BOTTOM, _TOP)
    x = Scale(min(iterations), max(iterations), _LEFT, _WIDTH - _RIGHT)
    if x.low == x.high:
        x = Scale(x.low - 1, x.high + 1, x.begin, x.end)
    lines = [
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" '
        f'aria-label="{escape(title)}">',
        f'<text class="title" x="{_LEFT:g}" y="16">{escape(title)}</text>',
        *_grid(ticks, y),
        *_iterations(iterations, x),
        *(_mark(mark, x) for mark in marks if x.low <= mark <= x.high),
    ]
    for number, each in enumerate(series):
        lines += _curve(each, number, x, y)
    return "\n".join([*lines, *(_legend(series) if len(series) > 1 else []), "</svg>"])


def round_steps(low: float, high: float, at_most: int = 5) -> list[float]:
    """Ascending multiples of 1, 2 or 5 times a power of ten, that enclose two values; never fewer than two.

    >>> round_steps(0.3, 3.9)
    [0.0, 1.0, 2.0, 3.0, 4.0]
    """
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # one value: its own size is the scale, or 1
        spread = abs(low) / 2 or 1.0
        low, high = low - spread, high + spread
    power = 10.0 ** math.floor(math.log10((high - low) / at_most))
    step = next(power * factor for factor in (1, 2, 5, 10) if (high - low) / (power * factor) <= at_most + 1e-9)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = max(0, -math.floor(math.log10(step)))
    return [round(step * number, digits) for number in range(first, last + 1)]


def thinned(points: Sequence[Point], buckets: int = _BUCKETS) -> list[Point]:
    """The same line with at most two points a bucket, the least and the greatest, in order: no spike is lost."""
    if len(points) <= 2 * buckets:
        return list(points)
    edges = [round(len(points) * number / buckets) for number in range(buckets + 1)]
    kept = list[Point]()
    for begin, end in pairwise(edges):
        bucket = points[begin:end]
        ends = {min(bucket, key=lambda point: point[1]), max(bucket, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


def _grid(ticks: Sequence[float], y: Scale) -> list[str]:
    lines = list[str]()
    for tick in ticks:
        at = y(tick)
        lines.append(f'<line class="grid" x1="{_LEFT:g}" x2="{_WIDTH - _RIGHT:g}" y1="{at:.1f}" y2="{at:.1f}"/>')
        lines.append(f'<text x="{_LEFT - 6:g}" y="{at + 4:.1f}" text-anchor="end">{_short(tick)}</text>')
    return lines


def _iterations(iterations: Sequence[float], x: Scale) -> list[str]:
    """Whole numbers below the axis, at most one each 60 units of its width."""
    low, high = min(iterations), max(iterations)
    ticks = [low] if low == high else [t for t in round_steps(low, high, 7) if low <= t <= high and t == int(t)]
    y = _HEIGHT - _BOTTOM + 16
    lines = [f'<text x="{x(tick):.1f}" y="{y:g}" text-anchor="middle">{tick:,.0f}</text>' for tick in ticks]
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    return [*lines, f'<text x="{middle:g}" y="{y + 14:g}" text-anchor="middle">iteration</text>']


def _mark(iteration: float, x: Scale) -> str:
    at, text = x(iteration), f"a process began after iteration {iteration:,.0f}"
    ends = f'x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP:g}" y2="{_HEIGHT - _BOTTOM:g}"'
    return f'<line class="mark" {ends}><title>{text}</title></line>'


def _curve(series: Series, number: int, x: Scale, y: Scale) -> list[str]:
    """The line, in as many pieces as gaps make, and a spot for the pointer at each point."""
    colour, shown = f"var(--series-{number % SERIES})", thinned(series.finite)
    dash = ' stroke-dasharray="5 3"' if number >= SERIES else ""
    lines = list[str]()
    for piece in _pieces(series.points):
        places = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in thinned(piece))
        lines.append(f'<polyline class="curve" style="stroke: {colour}"{dash} points="{places}"/>')
    if len(shown) <= _DOTTED:
        lines += [f'<circle cx="{x(a):.1f}" cy="{y(v):.1f}" r="2.6" style="fill: {colour}"/>' for a, v in shown]
    for at, value in shown:
        text = f"{series.name}, iteration {at:,.0f}: {value:.6g}"
        spot = f'cx="{x(at):.1f}" cy="{y(value):.1f}" r="5"'
        lines.append(f'<circle class="hit" {spot}><title>{escape(text)}</title></circle>')
    return lines


def _pieces(points: Sequence[Point]) -> list[list[Point]]:
    """Runs of points without a gap between them; one point alone is no line."""
    left, pieces = list(points), list[list[Point]]()
    while left:
        piece = list(takewhile(lambda point: math.isfinite(point[1]), left))
        left = left[len(piece) + 1 :]
        if len(piece) > 1:
            pieces.append(piece)
    return pieces


def _legend(series: Sequence[Series]) -> list[str]:
    """Names beside their colours, at the top on the right."""
    lines, x = list[str](), _WIDTH - _RIGHT
    for number, each in reversed(list(enumerate(series))):
        x -= 6.2 * len(each.name) + 26
        colour = f"var(--series-{number % SERIES})"
        lines.append(f'<rect x="{x:g}" y="9" width="12" height="4" rx="2" style="fill: {colour}"/>')
        lines.append(f'<text x="{x + 16:g}" y="15">{escape(each.name)}</text>')
    return lines


def _short(value: float) -> str:
    """A tick's number: plain where it is short so, else with an exponent."""
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:,.10g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e")
