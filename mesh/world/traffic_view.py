"""How traffic is shown to people: plans, outcomes, state, history.

Law: prints; no reading, no writing, no decision.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.table import Table

from mesh.traffic.outcome import Outcome
from mesh.traffic.proposal import Proposal
from regions.cli.output import emit_json, table, talk


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.1f} %"


def proposal(wanted: Proposal) -> None:
    """What would be written and what follows, before the question."""
    out = talk()
    out.print(f"{wanted.key}: {_value(wanted.before)} -> {_value(wanted.after)}", markup=False)
    for name, (before, after) in wanted.effect.items():
        if abs(before - after) > 1e-9:
            out.print(f"  {name}: {_percent(before)} -> {_percent(after)}", markup=False)
    for reason in wanted.refusals:
        out.print(f"  against it: {reason}", markup=False, style="yellow")


def _value(text: str | None) -> str:
    return "(absent)" if text is None else text


@contextmanager
def written(identity: str) -> Iterator[None]:
    """While waiting: an interrupt doesn't take the change back, and says so."""
    out = talk()
    out.print(f"written as change {identity}; waiting until it is applied", markup=False)
    try:
        yield
    except (asyncio.CancelledError, KeyboardInterrupt):  # asyncio.run turns Ctrl-C into the former
        out.print(f"the change stays; take it back with: weir traffic undo {identity}", markup=False)
        raise


def unchanged(wanted: Proposal, *, as_json: bool) -> None:
    talk().print("nothing to change", markup=False)
    if as_json:
        emit_json({"change": None, "key": wanted.key, "value": wanted.after, "applied": True})


def outcome(
    wanted: Proposal, identity: str, seen: Outcome | None, silent: Mapping[str, str], *, as_json: bool
) -> None:
    """What came of it; reasons name the region and the proxy."""
    if as_json:
        emit_json(
            {
                "change": identity,
                "key": wanted.key,
                "before": wanted.before,
                "value": wanted.after,
                "applied": seen.applied if seen else None,
                "observed": seen.observed if seen else None,
                "took_s": round(seen.took_s, 4) if seen else None,
                "share": seen.share if seen else None,
                "requests": seen.requests if seen else 0,
                "details": dict(seen.details) if seen else {},
                "silent": dict(silent),
            }
        )
    out = talk()
    if seen is not None:
        out.print(_sentence(seen), markup=False)
        for name, why in seen.details.items():
            out.print(f"  {name}: {why}", markup=False, style="yellow")
    for region, why in silent.items():
        out.print(f"  {region}: silent ({why}); it follows when it is back", markup=False, style="yellow")


def _sentence(seen: Outcome) -> str:
    if not seen.applied:
        return f"NOT applied within {seen.took_s:.1f} s:"
    start = f"applied everywhere in {seen.took_s * 1000:.0f} ms"
    if seen.observed is None:
        return f"{start}; not observed: {seen.requests} requests are too few to tell"
    word = "observed" if seen.observed else "but observed otherwise"
    return f"{start}; {word}: canary {_percent(seen.share)} of {seen.requests} requests"


def show(service: str, documents: Mapping[str, Any], silent: Mapping[str, str], *, as_json: bool) -> None:
    if as_json:
        emit_json({"service": service, "regions": dict(documents), "silent": dict(silent)})
        return
    grid = Table(title=f"traffic of {service}")
    for column in ("region", "canary", "key", "shares", "evacuated", "applied", "observed", "reason"):
        grid.add_column(column)
    for region, body in documents.items():
        shares = " ".join(f"{r}={_percent(s)}" for r, s in body["regions"].items())
        applied = f"{body['acknowledged']}/{body['connected']}" + ("" if body["applied"] else " NOT YET")
        seen = body["observed"]
        observed = f"{_percent(seen.get('canary'))} of {seen.get('requests', 0)}"
        out = ", ".join(body["evacuated"]) or "-"
        weight = body["canary_weight"]
        grid.add_row(
            region, _percent(weight["value"]), weight["key"], shares, out, applied, observed, body["reason"]
        )
    table().print(grid)
    for region, body in documents.items():
        for refusal in body["refusals"]:
            table().print(f"{region}: refused {refusal['key']}: {refusal['reason']}", markup=False)
        for nack in body["nacks"]:
            table().print(f"{region}: {nack['proxy']} rejected: {nack['reason']}", markup=False)
    for region, why in silent.items():
        talk().print(f"{region}: silent ({why})", markup=False, style="yellow")


def history(entries: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    if as_json:
        emit_json({"changes": [dict(e) for e in entries]})
        return
    grid = Table(title="changes, newest first")
    for column in ("id", "who", "key", "before", "after", "why", "source"):
        grid.add_column(column, overflow="fold")
    for e in entries:
        why = e["why"] + (" (forced)" if e["forced"] else "")
        grid.add_row(e["id"], e["who"], e["key"], _value(e["before"]), _value(e["after"]), why, e["source"])
    table().print(grid)
