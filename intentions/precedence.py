"""Which intention decides a call, by Consul's rules; what none decides is denied.

Law: pure and total: every pair of names gets a Decision with its reason. Consul itself allows by default when
its ACLs are off; weir's default is always deny.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from intentions.model import WILDCARD, Action, Intention

PRECEDENCE: Mapping[tuple[bool, bool], int] = MappingProxyType(
    {
        # (destination exact, source exact); the numbers are Consul's own, seen on 1.8.7
        (True, True): 9,
        (True, False): 8,
        (False, True): 6,
        (False, False): 5,
    }
)
"""The destination counts more than the source: `* -> chat` beats `web -> *`."""


@dataclass(frozen=True, slots=True)
class Decision:
    """action: what happens to the call. rule: the intention that said so, None for the default."""

    action: Action
    rule: Intention | None
    reason: str

    @property
    def allowed(self) -> bool:
        return self.action is Action.ALLOW


def precedence(intention: Intention) -> int:
    """Consul's number for it, 5 to 9; the highest that matches decides."""
    return PRECEDENCE[(intention.destination != WILDCARD, intention.source != WILDCARD)]


def matches(intention: Intention, source: str, destination: str) -> bool:
    """Whether the rule speaks about a call from `source` to `destination` (both exact names)."""
    return intention.source in (source, WILDCARD) and intention.destination in (destination, WILDCARD)


def by_precedence(intentions: Iterable[Intention]) -> tuple[Intention, ...]:
    """Deciding order, first match wins. Of two rules for the same pair (Consul has none) deny comes first."""
    return tuple(sorted(intentions, key=_rank))


def for_destination(intentions: Iterable[Intention], destination: str) -> tuple[Intention, ...]:
    """The rules that can decide a call to this service, in deciding order: what its sidecar enforces."""
    return by_precedence(i for i in intentions if i.destination in (destination, WILDCARD))


def decide(intentions: Iterable[Intention], source: str, destination: str) -> Decision:
    """Whether `source` may call `destination`. Same set in any order, same answer."""
    rules = by_precedence(i for i in intentions if matches(i, source, destination))
    if not rules:
        reason = f"denied by default: no intention speaks about {source} -> {destination}"
        return Decision(Action.DENY, None, reason)
    rule = rules[0]
    verb = "allowed" if rule.action is Action.ALLOW else "denied"
    beaten = f", over {len(rules) - 1} less exact" if len(rules) > 1 else ""
    reason = f"{verb} by {rule.source} -> {rule.destination} (precedence {precedence(rule)}{beaten})"
    return Decision(rule.action, rule, reason)


def _rank(intention: Intention) -> tuple[int, bool, str, str, str]:
    return (
        -precedence(intention),
        intention.action is Action.ALLOW,
        intention.destination,
        intention.source,
        intention.description,
    )
