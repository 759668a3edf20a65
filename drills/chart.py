"""The figure of a report: panels under one another on one time axis, events as lines through all of them.

Law: pure, Timeline in, SVG text out. Colours are CSS classes of the page (light and dark), never literals.
No script: values are told by <title>.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from drills import svg
from drills.svg import Axis, Plane
from drills.timeline import Line, Slot, Timeline

WIDTH, LEFT, RIGHT = 960.0, 52.0, 132.0
PLOT = WIDTH - LEFT - RIGHT
PANEL_H, GAP, TOP, BOTTOM = 104.0, 42.0, 35.0, 24.0
LABEL_H, LETTER = 13.0, 6.1
"""Height of a row for the names of events, and the width of a letter, in pixels."""

TIME_STEPS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 3600)


@dataclass(frozen=True, slots=True)
class Panel:
    """body draws into a Plane. ticks: (value, words) on the y axis. key: (css class, words), top first."""

    title: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    body: Callable[[Plane], list[str]]
    key: tuple[tuple[str, str], ...]


def draw(data: Timeline) -> str:
    """The whole figure; a note instead when there was no load."""
    if not data.slots:
        return '<p class="none">No request was sent, so there is nothing to plot.</p>'
    panels = (_rate(data), _success(data), _latency(data), _shares(data, "region"), _shares(data, "stage"))
    x = Axis(data.slots[0].at_s, data.slots[-1].at_s + data.width_s, LEFT, LEFT + PLOT)
    labels = place(data.lines, x)
    top = TOP + LABEL_H * max((label.row + 1 for label in labels), default=0)
    height = top + len(panels) * (PANEL_H + GAP) - GAP + BOTTOM
    inside = []
    for number, panel in enumerate(panels):
        inside += _frame(panel, x, top + number * (PANEL_H + GAP), data)
    inside += _events(labels, height - BOTTOM)
    inside += _time_axis(x, height - BOTTOM)
    return svg.element(
        "svg",
        "figure",
        *inside,
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        role="img",
        xmlns="http://www.w3.org/2000/svg",
        aria_label="Requests, success, latency and shares over time",
    )


def _frame(panel: Panel, x: Axis, top: float, data: Timeline) -> list[str]:
    plane = Plane(x, Axis(panel.low, panel.high, top + PANEL_H, top))
    right = LEFT + PLOT
    parts = [svg.label("title", LEFT, top - 8, panel.title)]
    if data.fault is not None:
        a, b = x(data.fault[0]), x(data.fault[1])
        parts.append(svg.element("rect", "fault", x=a, y=top, width=round(b - a, 1), height=PANEL_H))
    for value, words in panel.ticks:
        y = plane.y(value)
        parts.append(svg.element("line", "grid", x1=LEFT, x2=right, y1=y, y2=y))
        parts.append(svg.label("tick", LEFT - 8, y + 4, words, "end"))
    parts += panel.body(plane)
    for row, (css, words) in enumerate(panel.key):
        y = top + 12 + row * 17
        parts.append(svg.element("line", f"{css} swatch", x1=right + 10, x2=right + 24, y1=y - 4, y2=y - 4))
        parts.append(svg.label("key", right + 30, y, words))
    return parts


@dataclass(frozen=True, slots=True)
class Label:
    """The name of an event. at: x of its line; begin, end: what it covers of its row. All in pixels."""

    kind: str
    words: str
    at: float
    begin: float
    end: float
    row: int


def place(lines: Sequence[Line], x: Axis) -> list[Label]:
    """Each in the first row where it covers no other; to the left of its line where the right has no room."""
    placed: list[Label] = []
    for line in lines:
        at, words = x(line.at_s), f"{line.label} {line.at_s:+.2f} s"
        wide = LETTER * len(words) + 10
        begin = at - wide if at + wide > WIDTH else at
        taken = {label.row for label in placed if label.begin < begin + wide and begin < label.end}
        row = next(n for n in range(len(placed) + 1) if n not in taken)
        placed.append(Label(line.kind, words, at, begin, begin + wide, row))
    return placed


def _events(labels: Sequence[Label], bottom: float) -> list[str]:
    """Vertical lines with their names in rows above."""
    parts = []
    for label in labels:
        css, y, outside = f"event {label.kind}", 14 + label.row * LABEL_H, label.begin < label.at
        parts.append(svg.element("line", css, x1=label.at, x2=label.at, y1=y - 9, y2=bottom))
        start, anchor = (label.at - 4, "end") if outside else (label.at + 4, "start")
        parts.append(svg.label(css, start, y, label.words, anchor))
    return parts


def _time_axis(x: Axis, y: float) -> list[str]:
    step = next((s for s in TIME_STEPS if (x.high - x.low) / s <= 16), TIME_STEPS[-1])
    marks = range(math.ceil(x.low / step) * step, math.floor(x.high) + 1, step)
    return [svg.label("tick", x(m), y + 16, f"{m:+d} s" if m else "0", "middle") for m in marks]


def _rate(data: Timeline) -> Panel:
    top = _nice(1.1 * max(s.requests for s in data.slots) / data.width_s)

    def body(plane: Plane) -> list[str]:
        parts = []
        for slot in data.slots:
            good, bad = (slot.requests - slot.failed) / data.width_s, slot.failed / data.width_s
            words = f"{slot.at_s:+.1f} s: {slot.requests / data.width_s:.0f} requests/s, {slot.failed} failed"
            across = (slot.at_s, slot.at_s + data.width_s)
            parts.append(svg.bar("ok", plane, across, (0, good), words))
            if bad:
                # One failure among hundreds must still be seen.
                parts.append(svg.bar("failed", plane, across, (good, good + max(bad, top / 25)), words))
        return parts

    ticks = tuple((v, f"{v:g}") for v in (0.0, top / 2, top))
    return Panel("Requests per second", 0, top, ticks, body, (("ok", "answered"), ("failed", "failed")))


def _success(data: Timeline) -> Panel:
    rates = [(s.at_s, (s.requests - s.failed) / s.requests) for s in data.slots if s.requests]
    lowest = min((rate for _, rate in rates), default=1.0)
    low = next(v for v in (0.99, 0.95, 0.9, 0.5, 0.0) if lowest >= v)

    def body(plane: Plane) -> list[str]:
        pieces = [(at, rate, at + data.width_s) for at, rate in rates]
        bad = [(at + data.width_s / 2, rate) for at, rate in rates if rate < 1]
        dots = [svg.dot("failed", plane, p, f"{p[0]:+.1f} s: {p[1]:.2%}") for p in bad]
        return [svg.steps("success", plane, pieces), *dots]

    ticks = tuple((v, f"{v * 100:g} %") for v in (low, (1 + low) / 2, 1.0))
    return Panel("Success", low, 1.0, ticks, body, (("success", "answered whole"),))


def _latency(data: Timeline) -> Panel:
    seen = [v for s in data.slots for v in (s.p50_ms, s.p99_ms) if v is not None]
    low = math.floor(math.log10(max(0.1, min(seen, default=1.0))))
    high = max(low + 1.0, math.log10(max(seen, default=10.0)) + 0.1)

    def curve(css: str, pick: Callable[[Slot], float | None], plane: Plane) -> str:
        found = ((s.at_s + data.width_s / 2, pick(s)) for s in data.slots)
        return svg.line(css, plane, [(at, math.log10(max(0.1, v))) for at, v in found if v is not None])

    def body(plane: Plane) -> list[str]:
        return [curve("p99", lambda s: s.p99_ms, plane), curve("p50", lambda s: s.p50_ms, plane)]

    ticks = tuple((float(n), f"{10.0**n:g}") for n in range(low, math.floor(high) + 1))
    return Panel("Latency of plain requests, ms", low, high, ticks, body, (("p99", "p99"), ("p50", "p50")))


def _shares(data: Timeline, what: str) -> Panel:
    names = data.regions if what == "region" else data.stages
    css = {name: f"{what}{n % 6}" for n, name in enumerate(names)}

    def observed(slot: Slot) -> Mapping[str, float]:
        return slot.regions if what == "region" else slot.stages

    def body(plane: Plane) -> list[str]:
        parts = []
        slots = [s for s in data.slots if observed(s)]
        for name in names:
            parts.append(svg.steps(f"{css[name]} intended", plane, _plan_steps(data, what, name)))
            points = [(s.at_s + data.width_s / 2, observed(s).get(name, 0.0)) for s in slots]
            parts.append(svg.line(css[name], plane, points))
        return parts

    key = (*((css[name], name) for name in names), ("intended", "intended"))
    ticks = ((0.0, "0 %"), (0.5, "50 %"), (1.0, "100 %"))
    return Panel(f"Share per {what}", 0.0, 1.0, ticks, body, key)


def _plan_steps(data: Timeline, what: str, name: str) -> list[tuple[float, float, float]]:
    """(from, intended share, to)."""
    begin, end = data.slots[0].at_s, data.slots[-1].at_s + data.width_s
    starts = [max(at, begin) for at, _, _ in data.intended]
    values = [(r if what == "region" else s).get(name, 0.0) for _, r, s in data.intended]
    return [(a, v, b) for a, v, b in zip(starts, values, [*starts[1:], end], strict=False) if b > a]


def _nice(value: float) -> float:
    """The next round number above."""
    power = 10.0 ** math.floor(math.log10(max(value, 1.0)))
    return next((m * power for m in (1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8) if m * power >= value), 10 * power)
