"""How the pool is shown to people.

Law: prints and makes JSON; no reading, no decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from regions.cli.output import emit_json, table, talk
from services.pool.hand import Pool, Said
from services.pool.plan import Member, as_json

MIB = 2**20
REFUSED = -1
"""Status of what was not even asked."""


def status(pool: Pool, states: Mapping[tuple[str, str], Said], now: float, *, json: bool) -> None:
    """The whole pool; what only an instance itself knows comes from its own door."""
    if json:
        emit_json(
            {
                "instances": [_row_json(m, states) for m in pool.members],
                "silent": dict(pool.silent),
                "problems": list(pool.problems),
            }
        )
        return
    shown = Table("region", "instance", "stage", "state", "device", "load", "memory", "asleep", box=None)
    for who in pool.members:
        body = _body(who, states)
        device, memory = body.get("device") or {}, body.get("memory") or {}
        load = device.get("load")
        shown.add_row(
            who.region,
            who.instance,
            who.stage,
            who.shown,
            who.device or "-",
            "-" if load is None else f"{load:.0%}",
            f"{memory['now'] / MIB:.0f} MiB" if memory.get("now") else "-",
            f"{max(0.0, now - who.slept_at):.0f} s" if who.slept_at else "-",
        )
    table().print(shown)
    if not pool.members and not pool.silent:
        talk().print("no instance is registered: weir services list, weir status", style="yellow")
    for region, why in pool.silent.items():
        talk().print(
            f"{region}: its Consul doesn't answer ({why})", style="yellow", markup=False, soft_wrap=True
        )
    for problem in pool.problems:
        talk().print(problem, style="yellow", markup=False, soft_wrap=True)


def _body(who: Member, states: Mapping[tuple[str, str], Said]) -> Mapping[str, Any]:
    said = states.get((who.region, who.instance))
    return said.body if said is not None and said.ok else {}


def _row_json(who: Member, states: Mapping[tuple[str, str], Said]) -> dict[str, Any]:
    said = states.get((who.region, who.instance))
    own = None if said is None else dict(said.body) if said.ok else {"error": said.error}
    return as_json(who) | {"own": own}


def done(verb: str, who: Member, said: Said) -> None:
    """One line for the instance, one for each step: talk, not data."""
    out, outcome = talk(), said.body.get("outcome") or {}
    name = f"{who.region}/{who.instance}"
    if said.body.get("already"):
        out.print(f"{name}: {said.body['lifecycle']} already", markup=False, soft_wrap=True)
    elif said.ok:
        ms = float(outcome.get("seconds", 0.0)) * 1000
        out.print(f"{name}: {said.body.get('lifecycle')} after {ms:.0f} ms", markup=False, soft_wrap=True)
    else:
        out.print(f"{name}: {verb} failed: {said.error}", style="red", markup=False, soft_wrap=True)
    for step in outcome.get("steps", ()):
        note = f"  {step['note']}" if step["note"] else ""
        mark = "failed" if step["failed"] else f"{step['seconds'] * 1000:.1f} ms"
        out.print(f"  {step['name']}: {mark}{note}", markup=False, soft_wrap=True)
    if outcome.get("recovered"):
        out.print(
            f"  by a cold start, because: {outcome['recovered']}",
            style="yellow",
            markup=False,
            soft_wrap=True,
        )


def results(verb: str, rows: list[tuple[Member, Said]], *, json: bool) -> None:
    """The command's result."""
    if json:
        emit_json(
            {
                "verb": verb,
                "instances": [
                    {
                        "region": who.region,
                        "instance": who.instance,
                        "ok": said.ok,
                        "state": said.body.get("lifecycle"),
                        "error": said.error or None,
                        "outcome": said.body.get("outcome"),
                    }
                    for who, said in rows
                ],
            }
        )
        return
    for who, said in rows:
        state = said.body.get("lifecycle") or ("refused" if said.status == REFUSED else "unknown")
        table().print(f"{who.region}/{who.instance} {state}")
