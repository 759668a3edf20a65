"""When a request goes to the second engine, and what that is called.

Law: pure. `decide` is a total function from what is known to (engine, reason); rules are data, first match
wins, and what no rule names stays with the primary.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Which(StrEnum):
    PRIMARY = "primary"
    SECONDARY = "secondary"


class Reason(StrEnum):
    """Also the value of the header x-weir-fallback and the label of the metrics."""

    SEQUENCE_LENGTH = "sequence_length"
    FRAGMENTATION = "fragmentation"
    ENGINE_ERROR = "engine_error"
    QUEUE_FULL = "queue_full"


@dataclass(frozen=True, slots=True)
class Rule:
    """One reason and when it holds.

    over: sequence_length: tokens of prompt and answer together; fragmentation: share, 0..1. until:
    fragmentation only: once it held, it holds down to here, so that it doesn't flap. codes: queue_full and
    sequence_length: codes of the primary's refusal (faults.Refused) that mean the same.
    """

    when: Reason
    over: float = 0.0
    until: float = 0.0
    codes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        wrong = _wrong(self)
        if wrong:
            raise ValueError(f"{self.when}: {wrong}")


def _wrong(rule: Rule) -> str:
    if rule.when is Reason.SEQUENCE_LENGTH and rule.over < 1:
        return "over must be a number of tokens, 1 or more"
    if rule.when is Reason.FRAGMENTATION and not 0 <= rule.until <= rule.over < 1:
        return "wanted 0 <= until <= over < 1"
    if rule.when is Reason.QUEUE_FULL and not rule.codes:
        return "codes must name at least one"
    takes = {
        Reason.SEQUENCE_LENGTH: ("over", "codes"),
        Reason.FRAGMENTATION: ("over", "until"),
        Reason.QUEUE_FULL: ("codes",),
    }.get(rule.when, ())
    odd = [name for name in ("over", "until", "codes") if getattr(rule, name) and name not in takes]
    return f"{odd[0]} means nothing here" if odd else ""


DEFAULT_RULES = (
    Rule(Reason.SEQUENCE_LENGTH, over=8192, codes=("kv_never_fits", "context_length_exceeded")),
    Rule(Reason.FRAGMENTATION, over=0.65, until=0.55),
    Rule(Reason.ENGINE_ERROR),
    Rule(Reason.QUEUE_FULL, codes=("queue_full", "kv_full")),
)
"""S14's rules; services/fallback/rules.yaml says the same as a file to copy and change."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known when somebody must choose.

    sequence_tokens: prompt and max_tokens, guessed where EngineFacts say so. context: of the primary, 0:
    not known. fragmentation: of the primary's memory, 0..1. running: sequences at the primary. fragmented:
    whether the fragmentation rule held the last time. error: code of the fault that the primary answered this
    request with, or died of; refused: code of its refusal. secondary_dead: nobody to fall back
    to.
    """

    sequence_tokens: int = 0
    context: int = 0
    fragmentation: float = 0.0
    running: int = 0
    fragmented: bool = False
    error: str = ""
    refused: str = ""
    secondary_dead: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """reason: the rule's name, "" for the primary."""

    engine: Which
    reason: str = ""


STAY = Choice(Which.PRIMARY)


def decide(rules: tuple[Rule, ...], facts: Facts) -> Choice:
    """The first rule that holds sends the request to the secondary; none, or nobody there: the primary."""
    if facts.secondary_dead:
        return STAY
    for rule in rules:
        if holds(rule, facts):
            return Choice(Which.SECONDARY, rule.when.value)
    return STAY


def holds(rule: Rule, facts: Facts) -> bool:
    """Whether this rule speaks for the secondary.

    A primary with nothing running is never called fragmented: the figure is (reserved - allocated) /
    reserved, so it only rises once its traffic is gone, and no request would ever come back to it.
    """
    if rule.when is Reason.SEQUENCE_LENGTH:
        too_long = facts.sequence_tokens > rule.over or 0 < facts.context < facts.sequence_tokens
        return too_long or facts.refused in rule.codes
    if rule.when is Reason.FRAGMENTATION:
        limit = rule.until if facts.fragmented else rule.over
        return facts.running > 0 and facts.fragmentation > limit
    if rule.when is Reason.ENGINE_ERROR:
        return bool(facts.error)
    return facts.refused in rule.codes


def fragmented(rules: tuple[Rule, ...], facts: Facts) -> bool:
    """The next value of `Facts.fragmented`."""
    return any(rule.when is Reason.FRAGMENTATION and holds(rule, facts) for rule in rules)
