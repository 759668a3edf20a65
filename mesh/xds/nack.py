"""What is done about a rejected push: who is to blame, how long to wait, what is never sent again.

Law: pure; `now` is handed in (monotonic seconds). A quarantined (type, name, version) is not offered again
until its content changes, because re-sending what was refused is an endless loop that has ended in
out-of-memory elsewhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mesh.xds.wire import Push

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 10.0
"""Pause after the first NACK of a type, doubled with each further one in a row, and its cap."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A resource version that this proxy has rejected. `since`: monotonic seconds."""

    version: str
    reason: str
    since: float


class Quarantine:
    """What the rejections of one proxy have taught us, shared by its streams so that a reconnect keeps it.

    doubts: (type, name) of resources that a rejected update may have changed or not. Envoy goes on telling
    its old versions of them, also on its next stream, so these versions prove nothing.
    """

    __slots__ = ("_refused", "doubts")

    def __init__(self) -> None:
        self._refused: dict[tuple[str, str], Refused] = {}
        self.doubts: set[tuple[str, str]] = set()

    def add(self, type_url: str, name: str, refused: Refused) -> None:
        self._refused[type_url, name] = refused

    def of(self, type_url: str) -> dict[str, Refused]:
        """Refused versions of one type, by name."""
        if not self._refused:
            return {}
        return {name: refused for (kind, name), refused in self._refused.items() if kind == type_url}

    def forget(self, type_url: str, name: str) -> None:
        """The content has changed: the new one gets its own chance."""
        self._refused.pop((type_url, name), None)

    def __bool__(self) -> bool:
        return bool(self._refused)


class Trouble:
    """NACK state of one type on one stream: back-off and the search for the culprit."""

    __slots__ = ("at", "batch", "failures", "frozen", "not_before", "reason")

    def __init__(self) -> None:
        self.reason: str | None = None
        """Words of the last NACK; None once all that is desired has been accepted."""
        self.at = 0.0
        self.failures = 0
        self.not_before = 0.0
        self.batch: int | None = None
        """At most so many resources per push, while we look for the culprit by halving; None: no limit."""
        self.frozen: frozenset[str] = frozenset()
        """Removals that were refused; not offered again until other names are to be removed."""

    def nacked(self, push: Push, error: str, now: float) -> frozenset[str]:
        """Note a NACK; returns the names to blame, empty when the search has to go on with smaller pushes."""
        self.reason, self.at = error, now
        self.failures += 1
        self.not_before = now + min(FIRST_PAUSE_S * 2 ** min(self.failures - 1, 20), LONGEST_PAUSE_S)
        blamed = culprits(push, error)
        if not push.upserts:
            self.frozen = frozenset(push.removed)
        elif not blamed:
            self.batch = max(1, len(push.upserts) // 2)
        return blamed

    def acked(self) -> None:
        """An accepted push ends the back-off; the search doubles its step, as the culprit was not in
        there."""
        self.failures = 0
        self.not_before = 0.0
        self.frozen = frozenset()
        if self.batch is not None:
            self.batch *= 2

    def settled(self, *, clean: bool) -> None:
        """Nothing more to send. clean: nothing is quarantined either, so the alarm ends."""
        self.batch = None
        if clean:
            self.reason = None


def culprits(push: Push, error: str) -> frozenset[str]:
    """Names of the push that the error speaks of; a push of one resource needs no naming."""
    names = {resource.name for resource in push.upserts}
    if len(names) == 1:
        return frozenset(names)
    # Longest first, and cut out once found: `chat.x.stable` must not be blamed for `chat.x.stable-2`.
    found: set[str] = set()
    for name in sorted(names, key=len, reverse=True):
        pattern = re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w-])(?!\.\w)")
        if pattern.search(error):
            found.add(name)
            error = pattern.sub(" ", error)
    return frozenset(found)
