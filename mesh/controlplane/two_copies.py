"""Intentions are read twice: where they are written, and as the local copy of it. Which one is in force?

Law: pure. Consul copies intentions to the other datacenters at most once in 5 s after a burst of five
(measured on 1.8.7: the sixth change within half a minute took 5 s), so the original tells first. The copy is
for the time in which the primary can't be reached.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class TwoCopies(Generic[T]):
    """tell: gets the value in force; may be called with the same one again.

    reachable: whether the original answers now.
    """

    def __init__(self, tell: Callable[[T], None], reachable: Callable[[], bool]) -> None:
        self._tell, self._reachable = tell, reachable
        self._original: tuple[T] | None = None

    def original(self, value: T) -> None:
        """News from where it is written: always in force."""
        self._original = (value,)
        self._tell(value)

    def copy(self, value: T) -> None:
        """News of the local copy. It lags, so while the original answers it says nothing new: after a change
        there and back it would even tell the value in between."""
        if self._original is not None and self._reachable():
            self._tell(self._original[0])
        else:
            self._tell(value)
