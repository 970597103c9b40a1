"""The report's charts as inline SVG: colours come from the page's CSS, so that light, dark and print need no second drawing.

Each drawing has a text alternative (`aria-label`), and each mark a `<title>` that browsers show on hovering.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from markupsafe import Markup

_WIDTH, _HEIGHT = 1000, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 16, 12, 32


@dataclass(frozen=True)
class Bar:
    """One bar of a histogram."""

    value: float
    note: str
    """What it says on hovering."""


@dataclass(frozen=True)
class Range:
    """One slot's smallest, mean and largest norm."""

    label: str
    low: float
    mean: float
    high: float


def compact(value: float) -> str:
    """`950`, `12.5k`, `3.2M`: three digits are enough on an axis."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def area_chart(points: Sequence[tuple[float, float]], *, label: str, x_unit: str) -> Markup:
    """A curve over time with its area filled; points are (x, y) with x ascending."""
    x_top = points[-1][0] or 1.0
    ticks = _ticks(max(y for _, y in points) or 1.0)
    place = [(_x(x / x_top), _y(y / ticks[-1])) for x, y in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in place)
    base = _y(0)
    area = f"{place[0][0]:.1f},{base:.1f} {line} {place[-1][0]:.1f},{base:.1f}"
    marks = Markup("").join(
        Markup('<circle class="hover" cx="{}" cy="{}" r="7"><title>{} {}: {}</title></circle>').format(
            f"{px:.1f}", f"{py:.1f}", compact(x), x_unit, compact(y)
        )
        for (x, y), (px, py) in zip(points, place, strict=True)
    )
    shapes = Markup('<polygon class="area" points="{}"/><polyline class="line" points="{}"/>').format(area, line)
    return _svg(label, _grid(ticks) + shapes + marks + _along(x_top, x_unit))


def histogram(bars: Sequence[Bar], *, label: str, x_top: float) -> Markup:
    """Bars side by side over an axis from 0 to x_top."""
    ticks = _ticks(max(bar.value for bar in bars) or 1.0)
    step = (_WIDTH - _LEFT - _RIGHT) / len(bars)
    shapes = Markup("").join(
        Markup('<rect class="bar" x="{}" y="{}" width="{}" height="{}" rx="1.5"><title>{}</title></rect>').format(
            f"{_LEFT + index * step + step * 0.08:.1f}",
            f"{_y(bar.value / ticks[-1]):.1f}",
            f"{step * 0.84:.1f}",
            f"{_y(0) - _y(bar.value / ticks[-1]):.1f}",
            bar.note,
        )
        for index, bar in enumerate(bars)
    )
    return _svg(label, _grid(ticks) + shapes + _along(x_top))


def range_chart(ranges: Sequence[Range], *, label: str) -> Markup:
    """One line a slot from its smallest to its largest norm, with a dot at the mean, on a logarithmic axis."""
    positive = [value for entry in ranges for value in (entry.low, entry.mean, entry.high) if value > 0] or [1.0]
    first, last = floor(log10(min(positive))), ceil(log10(max(positive)))
    last += first == last
    row, left = 30, 140
    height = row * len(ranges) + 34

    def x(value: float) -> float:
        share = (log10(max(value, 10.0**first)) - first) / (last - first)
        return left + share * (_WIDTH - left - 24)

    decades = Markup("").join(
        Markup('<line class="grid" x1="{0}" x2="{0}" y1="4" y2="{1}"/>').format(f"{x(10.0**power):.1f}", height - 26)
        + _text(x(10.0**power), height - 8, compact(10.0**power), "middle")
        for power in range(first, last + 1)
    )
    rows = Markup("").join(
        Markup(
            '<g><title>{label}: {note}</title><text class="name" x="{name}" y="{text}" text-anchor="end">{label}</text>'
            '<line class="range" x1="{low}" x2="{high}" y1="{y}" y2="{y}"/>'
            '<circle class="end" cx="{high}" cy="{y}" r="3.5"/><circle class="mean" cx="{mean}" cy="{y}" r="6"/></g>'
        ).format(
            label=entry.label,
            note=f"min {entry.low:.4g}, mean {entry.mean:.4g}, max {entry.high:.4g}",
            name=left - 14,
            text=index * row + 24,
            y=index * row + 20,
            low=f"{x(entry.low):.1f}",
            mean=f"{x(entry.mean):.1f}",
            high=f"{x(entry.high):.1f}",
        )
        for index, entry in enumerate(ranges)
    )
    return _svg(label, decades + rows, height=height)


def _svg(label: str, content: Markup, *, height: int = _HEIGHT) -> Markup:
    return Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(_WIDTH, height, label, content)


def _grid(ticks: Sequence[float]) -> Markup:
    return Markup("").join(
        Markup('<line class="grid" x1="{0}" x2="{1}" y1="{2}" y2="{2}"/>').format(
            _LEFT, _WIDTH - _RIGHT, f"{_y(tick / ticks[-1]):.1f}"
        )
        + _text(_LEFT - 8, _y(tick / ticks[-1]) + 4, compact(tick), "end")
        for tick in ticks
    )


def _text(x: float, y: float, text: str, anchor: str) -> Markup:
    return Markup('<text x="{}" y="{}" text-anchor="{}">{}</text>').format(f"{x:.1f}", f"{y:.1f}", anchor, text)


def _ticks(top: float) -> list[float]:
    """0 and up to five round numbers, the last at or above top."""
    magnitude = 10.0 ** floor(log10(top))
    step = next(factor * magnitude for factor in (0.2, 0.25, 0.5, 1, 2, 2.5) if factor * magnitude * 5 >= top)
    return [step * index for index in range(ceil(top / step - 1e-9) + 1)]


def _along(top: float, unit: str = "") -> Markup:
    """The labels of an axis from 0 to top, at round numbers; the first has the unit."""
    labels = [tick for tick in _ticks(top) if tick <= top]
    return Markup("").join(
        _text(_x(tick / top), _HEIGHT - 8, f"{compact(tick)} {unit}".rstrip(), "start" if tick == 0 else "middle")
        for tick in labels
    )


def _x(share: float) -> float:
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _y(share: float) -> float:
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)
