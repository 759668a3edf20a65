"""The report as one HTML page: self-contained, no script, no request to anywhere.

Law: pure but for reading its own template. Formats values for people; judges nothing. jinja2 escapes
everything but the chart, which drills.svg has escaped.
"""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from drills.chart import draw
from drills.checks import failures
from drills.dye import DyeReport
from drills.history import Request
from drills.measure import lag_s, percentile, success_rate
from drills.model import Expect, Judgement
from drills.report import SHOWN_FAILURES, Report, failed, iso, retried

DASH = "–"
LATE_S = 0.25
"""A generator later than this is worth a word: latencies are then partly this machine's."""


def render(report: Report) -> str:
    """The page's text."""
    env = Environment(
        loader=PackageLoader("drills", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    lost, zero = failed(report.history), report.timeline.zero_s
    return env.get_template(
        "report.html.j2"
    ).render(
        r=report,
        chart=Markup(draw(report.timeline)),  # noqa: S704 - made by drills.svg, which escapes
        figures=_figures(report),
        expectations=[_expectation(j) for j in report.judgements],
        events=[
            {"at": f"{e.at_s - zero:+.2f} s", "mark": e.mark.value, "region": e.region, "what": e.what}
            for e in report.history.events
        ],
        phases=[
            {"name": p.name, "start": iso(p.start_s)[11:23], "seconds": f"{p.end_s - p.start_s:.1f} s"}
            for p in report.outcome.phases
        ],
        windows=_windows(report.dye),
        failed=[_failure(r, zero) for r in lost[:SHOWN_FAILURES]],
        more=len(lost) if len(lost) > SHOWN_FAILURES else 0,
        lag=seconds(lag_s(report.history.requests)) if lag_s(report.history.requests) > LATE_S else "",
        causes=", ".join(f"{n} × {why}" for why, n in failures(lost).items()) + ".",
    )


def seconds(value: float | None) -> str:
    """Seconds as a person reads them: ms below one second."""
    if value is None:
        return DASH
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def percent(value: float | None, digits: int = 2) -> str:
    return DASH if value is None else f"{value * 100:.{digits}f} %"


def number(value: float | None) -> str:
    return DASH if value is None else f"{value:,.0f}".replace(",", " ")


def _figures(report: Report) -> list[dict[str, str]]:
    requests, found = report.history.requests, report.reaction
    plain = [r.latency_s for r in requests if r.ok and not r.stream]
    rows = [
        (percent(success_rate(requests), 3), "success rate"),
        (seconds(report.recovery_s), "until ≥ 99.9 % for good"),
        (percent(report.dye.pooled.deviation if report.dye.pooled else None), "dye deviation"),
        (seconds(found.total_s if found else None), "MTTR of the control planes"),
        (number(len(requests)), "requests"),
        (number(sum(not r.ok for r in requests)), "failed"),
        (number(retried(report.history)), "retried"),
        (number(sum(r.cut for r in requests)), "streams cut"),
        (seconds(percentile(plain, 0.5)), "latency p50"),
        (seconds(percentile(plain, 0.99)), "latency p99"),
    ]
    if found is not None:
        parts = (("detect", found.detect_s), ("decide", found.decide_s), ("push", found.push_s))
        rows += [(seconds(value), name) for name, value in (*parts, ("applied", found.applied_s))]
    return [{"value": value, "label": label} for value, label in rows]


def _expectation(judged: Judgement) -> dict[str, str]:
    return {
        "what": judged.what.replace("_", " "),
        "wanted": judged.wanted,
        "got": got(judged.what, judged.got),
        "verdict": judged.verdict.value,
        "reason": judged.reason,
    }


def got(what: str, value: float | None) -> str:
    """The measured value in the unit of its expectation."""
    if value is None:
        return DASH
    if what in (Expect.SUCCESS_RATE, Expect.DYE_DEVIATION):
        return percent(value, 3 if what == Expect.SUCCESS_RATE else 2)
    return number(value) if what in (Expect.FAILED, Expect.STREAMS_CUT) else seconds(value)


def _windows(found: DyeReport) -> list[dict[str, str]]:
    named = [(f"plan {n}", w) for n, w in enumerate(found.windows, 1)]
    named += [("all together", found.pooled)] if found.pooled is not None else []
    return [
        {
            "name": name,
            "requests": number(w.requests),
            "where": w.where,
            "intended": percent(w.intended, 1),
            "observed": percent(w.observed, 1),
            "deviation": percent(w.deviation),
        }
        for name, w in named
    ]


def _failure(request: Request, zero: float) -> dict[str, Any]:
    by = "/".join(p for p in (request.region, request.stage) if p)
    return {
        "at": f"{request.due_s - zero:+.2f} s",
        "ingress": request.ingress,
        "by": by or DASH,
        "status": request.status or DASH,
        "after": seconds(request.latency_s),
        "tries": request.attempts or DASH,
        "error": ("stream cut: " if request.cut else "") + request.error,
    }
