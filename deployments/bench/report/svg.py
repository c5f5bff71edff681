"""Render plots as SVG text, without a library.

Colours are the page's CSS variables (--c0 to --c5, --ink, --faint), which follow light and dark
mode. Knows shapes and scales, and not what the values mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from remora.deployments.bench.report.figures import number
from remora.deployments.bench.report.record import BarChart, Plot, Points

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 30, 44
BAR_HEIGHT, LABEL_WIDTH, VALUE_WIDTH = 26, 230, 90
NUM_COLOURS = 6


def line_plot(plot: Plot) -> str:
    """Return lines with a marker at each point, a legend above, and a y axis from zero."""
    points = [point for line in plot.lines.values() for point in line]
    if not points:
        return ""
    x_scale = _Scale.of([x for x, _ in points], LEFT, WIDTH - RIGHT, is_log=plot.is_log_x)
    y_scale = _Scale.of([0.0, *(y for _, y in points)], HEIGHT - BOTTOM, TOP)
    ticks = sorted({x for x, _ in points}) if plot.is_log_x else _ticks(x_scale.low, x_scale.high)
    parts = [
        *(_x_tick(x_scale.place(x), _label(x)) for x in _thinned(ticks)),
        *(_y_tick(y_scale.place(y), _label(y)) for y in _ticks(0, y_scale.high)),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, plot.x_label, "middle"),
    ]
    for place, (name, line) in enumerate(plot.lines.items()):
        parts.append(_line(line, x_scale, y_scale, place % NUM_COLOURS))
        x = LEFT + 6 + (WIDTH - LEFT - RIGHT) / len(plot.lines) * place
        colour = f"var(--c{place % NUM_COLOURS})"
        parts.append(f'<circle cx="{x:.1f}" cy="12" r="4" fill="{colour}"/>')
        parts.append(_text(x + 9, 16, name, "start"))
    return _figure(f"{plot.title} ({plot.y_label})", WIDTH, HEIGHT, parts)


def bar_chart(chart: BarChart) -> str:
    """Return one horizontal bar for each value, with a whisker over its range."""
    if not chart.bars:
        return ""
    largest = max(max(bar.value, bar.high or 0.0) for bar in chart.bars)
    right = WIDTH - VALUE_WIDTH
    scale = _Scale(0.0, max(largest, chart.reference or 0.0) or 1.0, LABEL_WIDTH, right)
    height = BAR_HEIGHT * len(chart.bars) + 8
    parts: list[str] = []
    for place, bar in enumerate(chart.bars):
        y = 4 + BAR_HEIGHT * place
        middle = y + BAR_HEIGHT / 2
        end = scale.place(bar.value)
        parts.append(_text(LABEL_WIDTH - 8, middle + 4, bar.label, "end"))
        parts.append(
            f'<rect x="{LABEL_WIDTH}" y="{y + 4:.1f}" width="{max(end - LABEL_WIDTH, 0):.1f}" '
            f'height="{BAR_HEIGHT - 8}" fill="var(--c0)"/>'
        )
        if bar.low is not None and bar.high is not None:
            low, high = scale.place(bar.low), scale.place(bar.high)
            parts.append(_stroke(low, middle, high, middle, "var(--ink)"))
        parts.append(_text(right + 8, middle + 4, f"{number(bar.value)} {chart.unit}", "start"))
    if chart.reference is not None:
        x = scale.place(chart.reference)
        parts.append(_stroke(x, 0, x, height, "var(--ink)", dash="4 3"))
    return _figure(chart.title, WIDTH, height, parts)


class _Scale:
    """Maps values to pixels."""

    def __init__(self, low: float, high: float, start: float, end: float, is_log: bool = False):
        self.low, self.high = low, high
        self._start, self._end = start, end
        self._is_log = is_log

    @classmethod
    def of(
        cls, values: Sequence[float], start: float, end: float, *, is_log: bool = False
    ) -> _Scale:
        """Return a scale that shows all values, the largest just below the edge."""
        low, high = min(values), max(values)
        if is_log:
            return cls(max(low, 1e-9), max(high, low * 1.01, 1e-9), start, end, is_log=True)
        return cls(low, high * 1.05 if high > low else low + 1.0, start, end)

    def place(self, value: float) -> float:
        """Return the pixel of a value."""
        low, high = self.low, self.high
        if self._is_log:
            value, low, high = math.log(max(value, 1e-9)), math.log(low), math.log(high)
        return self._start + (value - low) / (high - low or 1.0) * (self._end - self._start)


def _ticks(low: float, high: float) -> list[float]:
    """Return four to nine round numbers in [low, high]."""
    raw = (high - low) / 5
    if raw <= 0:
        return [low]
    size = 10 ** math.floor(math.log10(raw))
    step = size * next(factor for factor in (1, 2, 5, 10) if factor * size >= raw)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _label(value: float) -> str:
    """Format a tick."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


def _thinned(ticks: Sequence[float], most: int = 10) -> Sequence[float]:
    return ticks if len(ticks) <= most else ticks[:: math.ceil(len(ticks) / most)]


def _line(line: Points, x_scale: _Scale, y_scale: _Scale, colour: int) -> str:
    places = [(x_scale.place(x), y_scale.place(y)) for x, y in line]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    stroke = f"var(--c{colour})"
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{stroke}">'
        f"<title>{number(px)}: {number(py)}</title></circle>"
        for (x, y), (px, py) in zip(places, line, strict=True)
    )
    return f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="2"/>{dots}'


def _x_tick(x: float, label: str) -> str:
    return _stroke(x, TOP, x, HEIGHT - BOTTOM, "var(--faint)") + _text(
        x, HEIGHT - BOTTOM + 16, label, "middle"
    )


def _y_tick(y: float, label: str) -> str:
    return _stroke(LEFT, y, WIDTH - RIGHT, y, "var(--faint)") + _text(LEFT - 6, y + 4, label, "end")


def _stroke(x1: float, y1: float, x2: float, y2: float, colour: str, dash: str = "") -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dashes}/>'
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="var(--ink)">'
        f"{escape(text)}</text>"
    )


def _figure(title: str, width: int, height: int, parts: Sequence[str]) -> str:
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title, quote=True)}">'
        f"{''.join(parts)}</svg></figure>"
    )
