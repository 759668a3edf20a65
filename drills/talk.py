"""What a person sees while a drill runs: phases, live figures, what was done. All of it on stderr.

Law: shows, decides nothing. On a terminal one line is redrawn; elsewhere a line of figures every few seconds.
"""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from drills.history import Request
from drills.measure import percentile
from drills.recorder import Recorder
from mesh.clock import Clock

WINDOW_S = 1.0
LINE_EVERY_S = 5.0


class Talk:
    """drills.pace.Progress on a console. Use as a context manager, so that the live line is taken away."""

    def __init__(self, console: Console, clock: Clock) -> None:
        self._console, self._clock = console, clock
        self._phase = ""
        self._next = 0.0
        self._status: Status | None = None

    def __enter__(self) -> Talk:
        if self._console.is_terminal:
            self._status = self._console.status("")
            self._status.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._status is not None:
            self._status.stop()

    def phase(self, name: str, why: str) -> None:
        self._phase = name
        self._next = self._clock.monotonic() + LINE_EVERY_S
        self._console.print(f"[bold]{name:<7}[/] {escape(why)}", soft_wrap=True)

    def say(self, text: str) -> None:
        self._console.print(f"        {escape(text)}", soft_wrap=True)

    def tick(self, recorder: Recorder) -> None:
        if self._status is None and self._clock.monotonic() < self._next:
            return
        told = figures(recorder.requests, self._clock.time())
        if self._status is not None:
            self._status.update(f"{self._phase}: {told}")
        elif told:
            self._console.print(f"        {told}", soft_wrap=True)
            self._next = self._clock.monotonic() + LINE_EVERY_S


def figures(requests: list[Request], now: float) -> str:
    """The last second in one line; "" before there was any load."""
    if not requests:
        return ""
    # Answers come in roughly in order, so the newest few thousand are enough to find the last second.
    recent = [r for r in requests[-5000:] if now - WINDOW_S - 0.5 <= r.due_s < now - 0.5]
    lost = sum(not r.ok for r in requests)
    if not recent:
        return f"no answers in the last second, {lost} of {len(requests)} failed so far"
    served = Counter(r.region for r in recent if r.region)
    total = sum(served.values()) or 1
    shares = ", ".join(f"{name} {count / total:.0%}" for name, count in sorted(served.items()))
    p99 = percentile([r.latency_s for r in recent if r.ok and not r.stream], 0.99)
    slow = f", p99 {p99 * 1000:.0f} ms" if p99 is not None else ""
    return f"{len(recent)} requests/s{slow}, {lost} of {len(requests)} failed so far; {shares}"
