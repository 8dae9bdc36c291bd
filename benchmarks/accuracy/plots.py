"""Figures as SVG files, written by hand: predicted against measured, and the share of rows within an error.

Dots are one path of round-capped strokes of no length for each group, some ten bytes a row. Colours follow the reader's
light or dark.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #333 } .small { font-size: 11px } .axis { stroke: #999 } .grid { stroke: #9994 }
.dots { fill: none; stroke-width: 4; stroke-linecap: round; stroke-opacity: .6 } .line { fill: none; stroke-width: 2 }
.same { stroke: #666; stroke-dasharray: 4 3 }
.c0 { stroke: #2a6fb0 } .c1 { stroke: #d1642a } .c2 { stroke: #2f8f5b } .c3 { stroke: #a23a86 } .c4 { stroke: #a08a1c } .c5 { stroke: #777 }
@media (prefers-color-scheme: dark) { text { fill: #ddd } .same { stroke: #aaa } .c0 { stroke: #6cb2f5 } .c1 { stroke: #ff9b62 }
.c2 { stroke: #63cf94 } .c3 { stroke: #e58acd } .c4 { stroke: #e2cc5c } .c5 { stroke: #bbb } }
"""
_LEFT, _TOP, _SIZE = 62, 34, 300
_SECOND = _LEFT + _SIZE + 90
_WIDTH, _HEIGHT = _SECOND + _SIZE + 24, _TOP + _SIZE + 52
_WITHIN = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
_NUM_COLOURS = 6


@dataclass(frozen=True, slots=True)
class _Scale:
    """A logarithmic axis from `low` to `high` on the first panel."""

    low: float
    high: float

    def share(self, value: float) -> float:
        return math.log(value / self.low) / math.log(self.high / self.low)

    def ticks(self) -> list[float]:
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        spread = self.high / self.low
        steps: Sequence[int] = (1,) if spread > 300 else (1, 2, 5) if spread > 8 else range(1, 10)
        return [
            step * 10.0**power
            for power in powers
            for step in steps
            if self.low <= step * 10.0**power <= self.high
        ]


def figure(
    title: str,
    unit: str,
    dots: Mapping[str, Sequence[tuple[float, float]]],
    absolute_errors: Mapping[str, Sequence[float]],
) -> str:
    """An SVG document. `dots`: (measured, predicted) of each row by group, in `unit`; `absolute_errors`: of each predictor."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        _text(_LEFT, 18, title),
        *_against(unit, dots),
        *_shares(absolute_errors),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _against(unit: str, dots: Mapping[str, Sequence[tuple[float, float]]]) -> list[str]:
    values = [value for pairs in dots.values() for pair in pairs for value in pair]
    scale = _Scale(min(values) / 1.15, max(values) * 1.15)
    bottom = _TOP + _SIZE
    parts = [_frame(_LEFT)]
    for tick in scale.ticks():
        x, y = _LEFT + scale.share(tick) * _SIZE, bottom - scale.share(tick) * _SIZE
        parts.append(f'<path class="grid" d="M{x:.1f} {_TOP}V{bottom}M{_LEFT} {y:.1f}H{_LEFT + _SIZE}"/>')
        parts.append(_text(x, bottom + 16, f"{tick:g}", "middle", small=True))
        parts.append(_text(_LEFT - 6, y + 4, f"{tick:g}", "end", small=True))
    parts.append(f'<path class="same" d="M{_LEFT} {bottom}L{_LEFT + _SIZE} {_TOP}"/>')
    for number, (name, pairs) in enumerate(dots.items()):
        places = "".join(
            f"M{_LEFT + scale.share(measured) * _SIZE:.1f} {bottom - scale.share(predicted) * _SIZE:.1f}h0"
            for measured, predicted in pairs
        )
        parts.append(f'<path class="dots c{number % _NUM_COLOURS}" d="{places}"/>')
        parts.append(_key(_LEFT + 10, _TOP + 16 + 16 * number, number, name))
    parts.append(_text(_LEFT + _SIZE / 2, bottom + 36, f"measured, {unit}", "middle"))
    parts.append(_upright(16, _TOP + _SIZE / 2, f"predicted, {unit}"))
    return parts


def _shares(absolute_errors: Mapping[str, Sequence[float]]) -> list[str]:
    """Share of rows within an error; the error's axis grows as its square root, beyond 100 % it is cut."""
    bottom = _TOP + _SIZE
    parts = [_frame(_SECOND)]
    for error in _WITHIN:
        x = _SECOND + math.sqrt(error) * _SIZE
        parts.append(f'<path class="grid" d="M{x:.1f} {_TOP}V{bottom}"/>')
        parts.append(_text(x, bottom + 16, f"{error:.0%}", "middle", small=True))
    for share in (0.25, 0.5, 0.75, 1.0):
        y = bottom - share * _SIZE
        parts.append(f'<path class="grid" d="M{_SECOND} {y:.1f}H{_SECOND + _SIZE}"/>')
        parts.append(_text(_SECOND - 6, y + 4, f"{share:.0%}", "end", small=True))
    for number, (name, errors) in enumerate(absolute_errors.items()):
        parts.append(f'<path class="line c{number}" d="{_steps(sorted(errors), bottom)}"/>')
        parts.append(_key(_SECOND + 8 + 110 * number, _TOP - 14, number, name))
    parts.append(_text(_SECOND + _SIZE / 2, bottom + 36, "off by at most", "middle"))
    parts.append(_upright(_SECOND - 44, _TOP + _SIZE / 2, "share of rows"))
    return parts


def _steps(errors: Sequence[float], bottom: float) -> str:
    """At most some 200 points of the distribution: of more rows every so many are drawn, and the last within 100 %."""
    every = max(1, len(errors) // 200)
    within = [error for error in errors if error <= 1]
    places = [(math.sqrt(error), (number + 1) / len(errors)) for number, error in enumerate(within)]
    drawn = [(0.0, 0.0), *places[::every], *places[-1:], (1.0, len(within) / len(errors))]
    return "M" + "L".join(f"{_SECOND + x * _SIZE:.1f} {bottom - y * _SIZE:.1f}" for x, y in drawn)


def _frame(left: float) -> str:
    return f'<rect class="axis" x="{left}" y="{_TOP}" width="{_SIZE}" height="{_SIZE}" fill="none"/>'


def _key(x: float, y: float, number: int, name: str) -> str:
    dot = f'<path class="dots c{number % _NUM_COLOURS}" style="stroke-width:8;stroke-opacity:1" d="M{x:.1f} {y - 4:.1f}h0"/>'
    return dot + _text(x + 10, y, name, small=True)


def _text(x: float, y: float, text: str, anchor: str = "start", *, small: bool = False) -> str:
    size = ' class="small"' if small else ""
    return f'<text{size} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _upright(x: float, y: float, text: str) -> str:
    return (
        f'<text transform="translate({x:.1f} {y:.1f}) rotate(-90)" text-anchor="middle">{escape(text)}</text>'
    )
