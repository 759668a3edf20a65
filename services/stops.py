"""Cut a text at its stop strings while it is still being made.

Law: pure state of one text; holds back just as much as could still turn out to be a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence


class Cutter:
    """Feed pieces; get what may be sent. `stopped` is set once a stop string was seen; it is not sent."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = tuple(stops), ""
        self.stopped = False

    def feed(self, piece: str) -> str:
        """The part that can't become a stop string any more."""
        if self.stopped:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        # The one that is complete first, and of those the longest: so the pieces' borders make no difference.
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def rest(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
