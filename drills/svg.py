"""SVG elements as text, and the map from values to pixels.

Law: pure; every text and attribute is escaped here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear map from [low, high] to pixels [start, end]; values outside stick to the edge."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = (self.high - self.low) or 1.0
        share = min(1.0, max(0.0, (value - self.low) / span))
        return round(self.start + share * (self.end - self.start), 1)


@dataclass(frozen=True, slots=True)
class Plane:
    """Where a panel's values go."""

    x: Axis
    y: Axis

    def points(self, points: Iterable[Point]) -> str:
        return " ".join(f"{self.x(a):g},{self.y(b):g}" for a, b in points)


def element(name: str, css: str, *inside: str, **attributes: float | str) -> str:
    """One element; `_` in attribute names stands for `-`. Strings in `inside` are elements already."""
    told = "".join(f' {k.replace("_", "-")}="{_text(v)}"' for k, v in attributes.items())
    body = "".join(inside)
    return (
        f'<{name} class="{escape(css)}"{told}>{body}</{name}>'
        if body
        else f'<{name} class="{escape(css)}"{told}/>'
    )


def label(css: str, x: float, y: float, words: str, anchor: str = "start") -> str:
    return element("text", css, escape(words), x=x, y=y, text_anchor=anchor)


def tip(words: str) -> str:
    """What a browser shows when the pointer rests on the element around it."""
    return f"<title>{escape(words)}</title>"


def line(css: str, plane: Plane, points: Sequence[Point]) -> str:
    return element("polyline", css, points=plane.points(points)) if points else ""


def steps(css: str, plane: Plane, pieces: Sequence[tuple[float, float, float]]) -> str:
    """A staircase of (from, value, to)."""
    return line(css, plane, [p for a, v, b in pieces for p in ((a, v), (b, v))])


def bar(css: str, plane: Plane, across: Point, up: Point, words: str) -> str:
    """A rectangle from `across[0]` to `across[1]` and from `up[0]` to `up[1]`, in values."""
    left, right = plane.x(across[0]), plane.x(across[1])
    top, bottom = plane.y(up[1]), plane.y(up[0])
    width, height = max(0.5, round(right - left - 1, 1)), round(max(0.0, bottom - top), 1)
    return element("rect", css, tip(words), x=left, y=top, width=width, height=height)


def dot(css: str, plane: Plane, point: Point, words: str) -> str:
    return element("circle", css, tip(words), cx=plane.x(point[0]), cy=plane.y(point[1]), r=2.5)


def _text(value: float | str) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else escape(value)
