"""A timeline as SVG: one row a rank, colour by kind, microbatch numbers, bubbles left open, in light and dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from pptrain.schedule import Kind
from pptrain.simulate import Span

_ROW, _GAP, _LEFT, _TOP, _WIDTH = 30, 6, 64, 44, 1100
_KINDS: Mapping[Kind, str] = {"F": "forward", "B": "backward", "I": "input part", "W": "weight part"}
# Dark enough for white numbers, light enough to stand out from a dark page; told apart also without colour vision.
_COLOURS: Mapping[Kind, str] = {"F": "#2f6fb5", "B": "#b3541e", "I": "#8a3f8f", "W": "#3d7a4a"}
_STYLE = """
  .timeline text { font: 12px system-ui, sans-serif; fill: #222 }
  .timeline .title { font-weight: 600; font-size: 14px }
  .timeline .cell { fill: #fff; text-anchor: middle; font-size: 10px }
  .timeline .back { fill: #ececec }
  @media (prefers-color-scheme: dark) {
    .timeline text { fill: #ddd } .timeline .cell { fill: #fff } .timeline .back { fill: #333 }
  }
"""
# A style counts for the whole page that a picture stands in.


def draw_svg(spans: Mapping[int, Sequence[Span]], title: str) -> str:
    """The picture's text.

    Args:
        spans: What each rank ran, all on one clock.
        title: Stands above.
    """
    everything = [span for row in spans.values() for span in row]
    begin = min((span.start for span in everything), default=0.0)
    length = max((span.end for span in everything), default=1.0) - begin
    scale, height = _WIDTH / (length or 1.0), _TOP + len(spans) * (_ROW + _GAP) + 34
    several = len({span.action.stage for span in everything}) > len(spans)
    size = f"0 0 {_LEFT + _WIDTH + 12} {height}"
    lines = [
        f'<svg class="timeline" xmlns="http://www.w3.org/2000/svg" viewBox="{size}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<text class="title" x="{_LEFT}" y="24">{escape(title)}</text>',
    ]
    for place, rank in enumerate(sorted(spans)):
        y = _TOP + place * (_ROW + _GAP)
        lines.append(f'<text x="8" y="{y + 20}">rank {rank}</text>')
        lines.append(f'<rect class="back" x="{_LEFT}" y="{y}" width="{_WIDTH}" height="{_ROW}"/>')
        lines += [_cell(span, _LEFT + (span.start - begin) * scale, y, scale, several) for span in spans[rank]]
    lines += _legend({span.action.kind for span in everything}, height - 22)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _cell(span: Span, x: float, y: float, scale: float, several: bool) -> str:
    """One action; its number where it fits, and its whole name where the pointer rests."""
    action, width = span.action, max((span.end - span.start) * scale - 1, 0.5)
    text = f"{action.stage}·{action.microbatch}" if several else str(action.microbatch)
    label = f'<text class="cell" x="{x + width / 2:.2f}" y="{y + 20}">{text}</text>' if width > 6 * len(text) else ""
    box = f'x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW}" rx="2"'
    return f'<g><title>{action}</title><rect {box} fill="{_COLOURS[action.kind]}"/>{label}</g>'


def _legend(kinds: set[Kind], y: float) -> list[str]:
    lines, x = list[str](), _LEFT
    for kind, name in _KINDS.items():
        if kind in kinds:
            lines.append(f'<rect x="{x}" y="{y}" width="14" height="14" rx="2" fill="{_COLOURS[kind]}"/>')
            lines.append(f'<text x="{x + 20}" y="{y + 11}">{name}</text>')
            x += 120
    lines.append(f'<rect class="back" x="{x}" y="{y}" width="14" height="14" rx="2"/>')
    return [*lines, f'<text x="{x + 20}" y="{y + 11}">bubble</text>']
