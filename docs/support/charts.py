"""Bars, lines and grids of cells as SVG, in the colours of the style sheet; the words for them come from the data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from docs.support.pictures import figure


def bar_chart(rows: Sequence[tuple[str, float]], caption: str, unit: str = "", digits: int = 0) -> str:
    """A bar a row, from zero; its number stands behind it. Numbers are at least 0."""
    label, width, pitch = 230, 330, 26
    top = max(value for _, value in rows) or 1.0
    parts = []
    for row, (name, value) in enumerate(rows):
        y = row * pitch
        text = f"{value:,.{digits}f}{unit and ' ' + unit}"
        size = max(value / top * width, 1)
        parts.append(
            f'<g><title>{escape(f"{name}: {text}")}</title><text class="tw-label" x="{label - 8}" y="{y + 16}" '
            f'text-anchor="end">{escape(name)}</text><rect class="tw-bar" x="{label}" y="{y + 2}" '
            f'width="{size:.1f}" height="{pitch - 6}" rx="3"/><text class="tw-label" x="{label + size + 6:.1f}" '
            f'y="{y + 16}">{escape(text)}</text></g>'
        )
    words = ", ".join(f"{name} {value:,.{digits}f}" for name, value in rows)
    size = label + width + 110
    return figure(f'viewBox="0 0 {size} {len(rows) * pitch}"', caption, parts, size, words=words)


@dataclass(frozen=True)
class _Axis:
    """From numbers to places on the page; logarithmic, or linear from zero."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float, log: bool) -> _Axis:
        low = min(values) if log else 0.0
        return cls(low, max(max(values), low * 1.001, 1e-12), start, end, log)

    def place(self, value: float) -> float:
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.log:
            step = 2 if self.high / self.low < 300 else 10
            powers = range(
                math.ceil(math.log(self.low, step) - 1e-9), math.floor(math.log(self.high, step) + 1e-9) + 1
            )
            return [float(step) ** power for power in powers]
        step = 10 ** math.floor(math.log10(self.high))
        while self.high / step < 3:
            step /= 2
        return [i * step for i in range(int(self.high / step) + 1)]


Points = Sequence[tuple[float, float]]


def line_chart(
    series: Mapping[str, Points],
    caption: str,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
) -> str:
    """A line a series, named at its right end."""
    left, right, top, bottom = 64, 480, 8, 210
    points = [point for line in series.values() for point in line]
    x_axis = _Axis.over([x for x, _ in points], left, right, log_x)
    y_axis = _Axis.over([y for _, y in points], bottom, top, log_y)
    parts = [f'<path class="tw-axis" d="M{left} {top} V{bottom} H{right}"/>']
    for tick in x_axis.ticks():
        x = x_axis.place(tick)
        parts.append(
            f'<text class="tw-small tw-middle" x="{x:.1f}" y="{bottom + 13}">{escape(f"{tick:g}")}</text>'
        )
    for tick in y_axis.ticks():
        y = y_axis.place(tick)
        parts.append(
            f'<path class="tw-grid" d="M{left} {y:.1f} H{right}"/><text class="tw-small" x="{left - 6}" '
            f'y="{y + 3:.1f}" text-anchor="end">{escape(f"{tick:g}")}</text>'
        )
    for number, (name, line) in enumerate(series.items()):
        path = " L".join(f"{x_axis.place(x):.1f} {y_axis.place(y):.1f}" for x, y in line)
        parts.append(f'<path class="tw-line tw-line-{number % 6}" d="M{path}"/>')
        parts += [
            f"<g><title>{escape(f'{name}: {x_label} {x:g}, {y_label} {y:.4g}')}</title>"
            f'<circle class="tw-dot-{number % 6}" cx="{x_axis.place(x):.1f}" cy="{y_axis.place(y):.1f}" r="3"/></g>'
            for x, y in line
        ]
    parts += _names(series, right, y_axis)
    parts.append(
        f'<text class="tw-small tw-middle" x="{(left + right) / 2}" y="{bottom + 28}">{escape(x_label)}</text>'
    )
    words = "; ".join(
        f"{name}: " + ", ".join(f"{x:g} gives {y:.4g}" for x, y in line) for name, line in series.items()
    )
    view = f'viewBox="0 -4 660 {bottom + 40}"'
    return figure(view, f"{caption} (vertical: {y_label})", parts, 700, words=words)


def _names(series: Mapping[str, Points], right: float, y_axis: _Axis) -> list[str]:
    """The name of each line right of the plot, as high as its end, moved apart where two would overlap."""
    ends = sorted(
        (y_axis.place(line[-1][1]), number, name) for number, (name, line) in enumerate(series.items())
    )
    places: list[float] = []
    for y, _, _ in ends:
        places.append(max(y + 4, places[-1] + 15 if places else y_axis.end + 4))
    too_low = max(places[-1] - y_axis.start, 0)  # up again, all of those that stand close together
    for i in reversed(range(len(places))):
        limit = places[i + 1] - 15 if i + 1 < len(places) else places[i] - too_low
        places[i] = min(places[i], limit)
    return [
        f'<text class="tw-label tw-ink-{number % 6}" x="{right + 10:.1f}" y="{place:.1f}">{escape(name)}</text>'
        for place, (_, number, name) in zip(places, ends, strict=True)
    ]


@dataclass(frozen=True)
class Cell:
    """A square of `cell_grid`: what stands in it, its class in the style sheet, and what it means in words."""

    text: str
    style: str
    meaning: str


def cell_grid(
    rows: Mapping[str, Sequence[Cell | None]], caption: str, legend: str = "", size: int = 30, label: int = 60
) -> str:
    """Rows of squares; None leaves a gap."""
    parts = []
    for row, (name, cells) in enumerate(rows.items()):
        y = row * (size + 4)
        parts.append(f'<text class="tw-label" x="0" y="{y + size / 2 + 4}">{escape(name)}</text>')
        for column, cell in enumerate(cells):
            if cell is None:
                continue
            x = label + column * (size + 2)
            parts.append(
                f'<g><title>{escape(cell.meaning)}</title><rect class="tw-block {cell.style}" x="{x}" y="{y}" '
                f'width="{size}" height="{size}" rx="3"/><text class="tw-cell" x="{x + size / 2}" '
                f'y="{y + size / 2 + 4}">{escape(cell.text)}</text></g>'
            )
    width = label + max(map(len, rows.values())) * (size + 2)
    view = f'viewBox="-2 -2 {width + 4} {len(rows) * (size + 4) + 2}"'
    return figure(view, caption, parts, min(width * 1.25, 760), legend)
