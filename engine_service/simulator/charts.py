"""Charts as SVG text: no dependencies, colours by CSS class so that a page can be light or dark.

Decides how a picture looks, not what it shows. Every chart is 360 units wide, so that on a phone its text is
as large as the page's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

WIDTH: Final = 360
NUM_COLOURS: Final = 8
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 10, 8, 26


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A named series of (x, y); None as y leaves a gap."""

    name: str
    colour: int
    points: Sequence[tuple[float, float | None]]
    is_dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A row with a bar from low to high and marks in it."""

    label: str
    group: str
    colour: int
    low: float
    middle: float
    high: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One request's life: it waited from start to turn, then was answered until end (None: never)."""

    label: str
    colour: int
    start: float
    turn: float | None
    end: float | None


@dataclass(frozen=True, slots=True)
class _Scale:
    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, max(self.low, min(self.high, value))
        if self.is_log:
            low, high, at = math.log10(low), math.log10(high), math.log10(at)
        return self.start + (at - low) / ((high - low) or 1.0) * (self.end - self.start)


def colour(index: int) -> str:
    """Return the CSS class of a colour; they repeat after `NUM_COLOURS`."""
    return f"c{index % NUM_COLOURS}"


def ranges(rows: Sequence[Range], *, title: str) -> str:
    """Return horizontal bars on a logarithmic time axis, rows of a group together."""
    if not rows:
        return ""
    low = 10 ** math.floor(math.log10(max(1e-3, min(r.low for r in rows))))
    high = 10 ** math.ceil(math.log10(max(low * 10, *(r.high for r in rows))))
    x = _Scale(low, high, 12, WIDTH - 14, is_log=True)
    parts, y, group = [], 6.0, None
    for row in rows:
        if row.group != group:
            group = row.group
            y += 16
            parts.append(f'<text class="strong" x="0" y="{y:.0f}">{escape(group)}</text>')
            y += 6
        y += 13
        parts.append(f'<text class="small" x="0" y="{y:.0f}">{escape(row.label)}</text>')
        parts.append(f'<text class="small end" x="{WIDTH}" y="{y:.0f}">{escape(row.text)}</text>')
        y += 7
        parts.append(
            f'<line class="track" x1="12" x2="{WIDTH - 14}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<line class="bar {colour(row.colour)}" x1="{x(row.low):.1f}" x2="{x(row.high):.1f}"'
            f' y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<circle class="dot {colour(row.colour)}" cx="{x(row.middle):.1f}" cy="{y:.1f}" r="4"/>'
        )
        y += 5
    bottom = y + 6
    for exponent in range(round(math.log10(low)), round(math.log10(high)) + 1):
        at = x(10.0**exponent)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="12" y2="{bottom:.1f}"/>')
        label = _time_label(10.0**exponent)
        parts.append(_tick(at, bottom + 13, label))
    return _svg(parts, bottom + 18, title)


def lives(bars: Sequence[Bar], *, end_s: float, title: str, caption: str = "") -> str:
    """Return a row per request: a thin line while it waits for its first word, a thick one until its end."""
    if not bars:
        return ""
    x = _Scale(0.0, end_s, 74, WIDTH - _RIGHT)
    row, top = 8.0, 18.0 if caption else 4.0
    bottom = top + row * len(bars) + 4
    parts = [f'<text class="strong" x="0" y="12">{escape(caption)}</text>'] if caption else []
    for value in _time_ticks(end_s):
        parts.append(
            f'<line class="grid" x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{top:.1f}" y2="{bottom:.1f}"/>'
        )
        parts.append(_tick(x(value), bottom + 12, _clock_label(value, end_s)))
    shown = None
    for i, bar in enumerate(bars):
        y = top + row * (i + 0.5) + 2
        turn, end = (end_s if at is None else min(at, end_s) for at in (bar.turn, bar.end))
        if bar.label != shown:
            shown = bar.label
            parts.append(f'<text class="small" x="0" y="{y + 4:.1f}">{escape(bar.label)}</text>')
        parts.append(
            f'<line class="line {colour(bar.colour)}" x1="{x(bar.start):.1f}" x2="{x(turn):.1f}"'
            f' y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        until = max(x(end), x(turn) + 1)
        parts.append(
            f'<line class="answer {colour(bar.colour)}" x1="{x(turn):.1f}" x2="{until:.1f}"'
            f' y1="{y:.1f}" y2="{y:.1f}"/>'
        )
    return _svg(parts, bottom + 18, title)


def standalone(pictures: Sequence[str], style: str) -> str:
    """Return one SVG document with the pictures one below the other, in the page's style."""
    placed, y = [], 8.0
    for picture in pictures:
        height = float(picture.split('viewBox="', 1)[1].split('"', 1)[0].split()[3])
        place = f'<svg x="10" y="{y:.0f}" width="{WIDTH}" height="{height:.0f}" '
        placed.append(picture.replace("<svg ", place, 1))
        y += height + 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 20} {y:.0f}">'
        f'<style>{style}</style><rect width="100%" height="100%" style="fill: var(--paper)"/>'
        f"{''.join(placed)}</svg>\n"
    )


def lines(
    series: Sequence[Line], *, title: str, y_title: str, height: int = 170, is_log: bool = False
) -> str:
    """Return lines over time (x in seconds)."""
    values = [y for line in series for _, y in line.points if y is not None]
    ends = [x for line in series for x, _ in line.points]
    if not values or not ends:
        return ""
    low = 10 ** math.floor(math.log10(max(1e-3, min(values)))) if is_log else 0.0
    high = 10 ** math.ceil(math.log10(max(low * 10, *values))) if is_log else _nice(max(values))
    x = _Scale(0.0, max(ends) or 1.0, _LEFT, WIDTH - _RIGHT)
    y = _Scale(low, high, height - _BOTTOM, _TOP, is_log=is_log)
    parts = [*_axes(x, y, height, y_title)]
    parts += [_polyline(line, x, y) for line in series]
    return _svg(parts, height, title)


def _polyline(line: Line, x: _Scale, y: _Scale) -> str:
    path, is_open = "", False
    for at, value in line.points:
        if value is None:
            is_open = False
            continue
        path += f"{'L' if is_open else 'M'}{x(at):.1f} {y(value):.1f}"
        is_open = True
    dashes = " dashed" if line.is_dashed else ""
    return f'<path class="line{dashes} {colour(line.colour)}" d="{path}"/>'


def points(series: Sequence[Line], *, title: str, y_title: str, height: int = 170) -> str:
    """Return a scatter over time with a logarithmic time axis upwards."""
    values = [y for line in series for _, y in line.points if y is not None]
    if not values:
        return ""
    low = 10 ** math.floor(math.log10(max(1e-2, min(values))))
    high = 10 ** math.ceil(math.log10(max(low * 10, *values)))
    x = _Scale(0.0, max(x for line in series for x, _ in line.points) or 1.0, _LEFT, WIDTH - _RIGHT)
    y = _Scale(low, high, height - _BOTTOM, _TOP, is_log=True)
    parts = [*_axes(x, y, height, y_title, _time_label)]
    for line in series:
        dots = "".join(f"M{x(at):.1f} {y(value):.1f}h0" for at, value in line.points if value is not None)
        parts.append(f'<path class="dots {colour(line.colour)}" d="{dots}"/>')
    return _svg(parts, height, title)


def stacked(
    series: Sequence[tuple[str, int, Sequence[float]]],
    *,
    step_s: float,
    title: str,
    y_title: str,
    height: int = 150,
) -> str:
    """Return areas one upon the other: (name, colour, a value per step)."""
    length = min((len(values) for _, _, values in series), default=0)
    if not length:
        return ""
    tops = [0.0] * length
    highest = max(sum(values[i] for _, _, values in series) for i in range(length))
    x = _Scale(0.0, length * step_s, _LEFT, WIDTH - _RIGHT)
    y = _Scale(0.0, _nice(highest), height - _BOTTOM, _TOP)
    areas = []
    for _, index, values in series:
        floor = [*tops]
        tops = [top + value for top, value in zip(tops, values, strict=False)]
        up = "".join(
            f"{'M' if i == 0 else 'L'}{x((i + 0.5) * step_s):.1f} {y(top):.1f}" for i, top in enumerate(tops)
        )
        down = "".join(f"L{x((i + 0.5) * step_s):.1f} {y(floor[i]):.1f}" for i in reversed(range(length)))
        areas.append(f'<path class="area {colour(index)}" d="{up}{down}Z"/>')
    return _svg([*areas, *_axes(x, y, height, y_title)], height, title)


def legend(entries: Sequence[tuple[str, int]]) -> str:
    """Return HTML that names colours."""
    return '<p class="legend">' + " ".join(
        f'<span><i class="{colour(index)}"></i>{escape(name)}</span>' for name, index in entries
    ) + "</p>"  # fmt: skip


def _axes(
    x: _Scale, y: _Scale, height: int, y_title: str, label: Callable[[float], str] | None = None
) -> list[str]:
    parts = []
    for value in _ticks(y):
        at = y(value)
        shown = label(value) if label is not None else _number_label(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="small end" x="{_LEFT - 4}" y="{at + 4:.1f}">{shown}</text>')
    for value in _time_ticks(x.high):
        at = x(value)
        parts.append(_tick(at, height - 10, _clock_label(value, x.high)))
    parts.append(f'<text class="small" x="{_LEFT + 2}" y="{_TOP + 9}">{escape(y_title)}</text>')
    return parts


def _svg(parts: Sequence[str], height: float, title: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title, quote=True)}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


def _tick(at: float, y: float, label: str) -> str:
    """Return a label under an axis, kept inside the picture."""
    half = 3.0 * len(label)
    at = max(half, min(WIDTH - half, at))
    return f'<text class="tick" x="{at:.1f}" y="{y:.0f}">{escape(label)}</text>'


def _nice(value: float) -> float:
    """Return the next round number (1, 2, 5 times a power of ten)."""
    if value <= 0:
        return 1.0
    base = 10.0 ** math.floor(math.log10(value))
    return next(step * base for step in (1, 2, 5, 10) if step * base >= value * (1 - 1e-9))


def _ticks(y: _Scale) -> list[float]:
    if y.is_log:
        first, last = round(math.log10(y.low)), round(math.log10(y.high))
        return [10.0**exponent for exponent in range(first, last + 1)]
    return [y.high * part / 4 for part in range(5)]


def _time_ticks(end_s: float) -> list[float]:
    steps = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400)
    step = next((s for s in steps if end_s / s <= 6), 86400)
    return [float(at) for at in range(0, int(end_s) + 1, step)]


def _clock_label(value: float, end_s: float) -> str:
    if end_s < 180:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if end_s < 4 * 3600 else f"{value / 3600:.0f} h"


def _time_label(value: float) -> str:
    if value < 1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.0f} s" if value < 1000 else f"{value / 60:.0f} min"


def _number_label(value: float) -> str:
    for limit, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{sign}"
    return f"{value:.3g}"
