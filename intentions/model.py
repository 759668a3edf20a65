"""Intentions as frozen values.

Law: pure. No I/O, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

WILDCARD = "*"


class Action(StrEnum):
    ALLOW = "allow"
    DENY = "deny"


@dataclass(frozen=True, slots=True, order=True)
class Intention:
    """`source` may (or may not) call `destination`. Names are Consul service names or `*`.

    `description` is for people and takes part in no decision.
    """

    destination: str
    source: str
    action: Action
    description: str = ""
