"""The report: an Outcome judged, as frozen values and as the JSON that other tools read.

Law: pure. The keys of `to_json` that the issue names are a public interface; more may be added. Numbers
that were not measured are null.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from drills.checks import failures, judge, verdict
from drills.dye import DyeReport, dye
from drills.history import History, Request
from drills.measure import Reaction, lag_s, percentile, reaction, recovery_s, success_rate
from drills.model import Judgement, Scenario, Verdict
from drills.outcome import Outcome
from drills.timeline import Timeline, timeline

SHOWN_FAILURES = 50


@dataclass(frozen=True, slots=True)
class Facts:
    """Who, where, with what. versions: of weir, Envoy, Consul, Python, kernel. command: as it was typed."""

    id: str
    by: str
    started: str
    versions: Mapping[str, str]
    command: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    facts: Facts
    scenario: Scenario
    outcome: Outcome
    verdict: Verdict
    reason: str
    judgements: tuple[Judgement, ...]
    reaction: Reaction | None
    recovery_s: float | None
    dye: DyeReport
    timeline: Timeline

    @property
    def history(self) -> History:
        return self.outcome.history


def build(facts: Facts, scenario: Scenario, outcome: Outcome) -> Report:
    """Judge and collect. A drill that was not carried out as written is never better than UNKNOWN."""
    history = outcome.history
    judgements = judge(history, scenario)
    decided = verdict(judgements, healed=outcome.healed)
    reason = _reason(decided, judgements, outcome)
    if (outcome.problem or outcome.interrupted) and outcome.healed:
        decided = Verdict.UNKNOWN
        reason = "interrupted; everything is healed" if outcome.interrupted else outcome.problem
    return Report(
        facts,
        scenario,
        outcome,
        decided,
        reason,
        judgements,
        reaction(history),
        recovery_s(history),
        dye(history),
        timeline(history),
    )


def _reason(decided: Verdict, judgements: tuple[Judgement, ...], outcome: Outcome) -> str:
    if not outcome.healed:
        return "not healed: " + "; ".join(outcome.by_hand or outcome.proofs[-1:])
    if decided is Verdict.PASS:
        return "every expectation was met, and everything is healed"
    return "; ".join(f"{j.what}: {j.reason}" for j in judgements if j.verdict is decided)


def retried(history: History) -> int | None:
    """Requests that Envoy tried more than once: by the answers' own count where told, else by its counter."""
    if any(r.attempts for r in history.requests):
        return sum(r.attempts > 1 for r in history.requests)
    return history.retried_by_stat


def to_json(report: Report, path: str) -> dict[str, Any]:
    """The JSON of `weir drill run --json` and of report.json. path: of the HTML page."""
    history = report.history
    requests = history.requests
    return {
        "schema_version": 1,
        "drill": report.scenario.name,
        "verdict": report.verdict.value,
        "success_rate": success_rate(requests),
        "dye_deviation": _rounded(report.dye.pooled.deviation) if report.dye.pooled else None,
        "mttr_s": _rounded(report.reaction.total_s) if report.reaction else None,
        "mttr_parts": _parts(report.reaction),
        "requests": len(requests),
        "failed": sum(not r.ok for r in requests),
        "retried": retried(history),
        "streams_cut": sum(r.cut for r in requests),
        "healed": report.outcome.healed,
        "report": path,
        "reason": report.reason,
        "recovery_s": _rounded(report.recovery_s),
        "load_lag_s": _rounded(lag_s(requests)),
        "latency_ms": _latency(requests),
        **_circumstances(report),
        **_evidence(report),
    }


def _circumstances(report: Report) -> dict[str, Any]:
    scenario, facts = report.scenario, report.facts
    return {
        "id": facts.id,
        "title": scenario.title,
        "target": scenario.target,
        "mode": scenario.mode,
        "service": scenario.service,
        "by": facts.by,
        "started": facts.started,
        "command": facts.command,
        "versions": dict(facts.versions),
        "interrupted": report.outcome.interrupted,
        "problem": report.outcome.problem,
        "load": asdict(scenario.load),
        **({"fitted": asdict(scenario.fitted)} if scenario.fitted else {}),
        "phases": [
            {"name": p.name, "start": iso(p.start_s), "seconds": _rounded(p.end_s - p.start_s)}
            for p in report.outcome.phases
        ],
    }


def _evidence(report: Report) -> dict[str, Any]:
    outcome, zero = report.outcome, report.timeline.zero_s
    return {
        "expectations": [
            {
                "what": j.what,
                "wanted": j.wanted,
                "got": _rounded(j.got),
                "verdict": j.verdict.value,
                "reason": j.reason,
            }
            for j in report.judgements
        ],
        "steady_state": [asdict(f) for f in outcome.steady],
        "done": list(outcome.done),
        "healing": {"proofs": list(outcome.proofs), "by_hand": list(outcome.by_hand)},
        "events": [
            {"at_s": _rounded(e.at_s - zero), "mark": e.mark.value, "what": e.what, "region": e.region}
            for e in outcome.history.events
        ],
        "dye": {
            "undyed": report.dye.undyed,
            "windows": [{k: _rounded(v) for k, v in asdict(w).items()} for w in report.dye.windows],
        },
        "failures": failures(outcome.history.requests),
        "failed_requests": [_failure(r, zero) for r in failed(outcome.history)[:SHOWN_FAILURES]],
        "scenario": report.scenario.text,
    }


def failed(history: History) -> list[Request]:
    """Failed requests in order of time."""
    return [r for r in history.requests if not r.ok]


def _failure(request: Request, zero: float) -> dict[str, Any]:
    return {
        "at_s": _rounded(request.due_s - zero),
        "ingress": request.ingress,
        "region": request.region,
        "stage": request.stage,
        "status": request.status,
        "latency_s": _rounded(request.latency_s),
        "stream": request.stream,
        "cut": request.cut,
        "attempts": request.attempts,
        "error": request.error,
    }


def _parts(found: Reaction | None) -> dict[str, float | None]:
    names = ("detect", "decide", "push", "applied")
    return {name: _rounded(getattr(found, f"{name}_s")) if found else None for name in names}


def _latency(requests: tuple[Request, ...]) -> dict[str, float | None]:
    """Of plain (not streamed) requests that were answered, milliseconds."""
    values = [r.latency_s * 1000 for r in requests if r.ok and not r.stream]
    return {f"p{name}": _rounded(percentile(values, share)) for name, share in (("50", 0.5), ("99", 0.99))}


def _rounded(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value


def iso(at_s: float) -> str:
    """Unix seconds as ISO 8601 in UTC, to the millisecond."""
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
