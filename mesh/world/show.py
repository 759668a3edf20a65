"""A world's status for people: tables from the same object that `--json` prints.

Law: plain data in, rich tables out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mesh.world.world import World


def view(body: Mapping[str, Any]) -> RenderableType:
    """Tables of regions and of traffic."""
    return Group(_regions(body["regions"]), *(_traffic(n, t) for n, t in body["traffic"].items()))


def _regions(regions: Mapping[str, Any]) -> Table:
    table = Table("region", "ready", "stable", "canary", "Consul UI", "ingress", "note", box=None)
    for name, row in regions.items():
        stages = row["services"].get("chat", {})
        table.add_row(
            name,
            "[green]yes[/]" if row["ready"] else "[red]no[/]",
            *(_count(stages.get(stage)) for stage in ("stable", "canary")),
            f"{row['consul']}/ui",
            row["ingress"],
            _note(row),
        )
    return table


def _count(stage: Mapping[str, int] | None) -> str:
    return f"{stage['healthy']}/{stage['instances']}" if stage else "-"


def _note(row: Mapping[str, Any]) -> str:
    odd = [f"{name} {state}" for name, state in row["processes"].items() if state != "ready"]
    resting = [f"{name} {lifecycle}" for name, lifecycle in sorted(row["resting"].items())]
    return "; ".join([*([row["error"]] if row["error"] else []), *odd, *resting])


def _traffic(service: str, body: Mapping[str, Any]) -> RenderableType:
    observed = body["observed"]
    title = ", ".join(part for part in (_head(service, body), _seen(observed), _gone(body)) if part)
    table = Table("region", "share", "observed", "applied", "proxies", "refusal", box=None)
    for name, row in body["per_region"].items():
        table.add_row(
            name,
            _percent(body["regions"].get(name)),
            _percent(observed["regions"].get(name)),
            "yes" if row["applied"] else "no",
            f"{row['acknowledged']}/{row['connected']}",
            row["refusal"] or "",
        )
    return Group("", Text(title, overflow="fold"), table)


def _head(service: str, body: Mapping[str, Any]) -> str:
    weight = body["canary_weight"]
    if not weight:
        return f"{service}: no status yet"
    return f"{service}: canary {weight['value']:.4g} ({weight['key']})"


def _seen(observed: Mapping[str, Any]) -> str:
    if not observed["requests"]:
        return ""
    return f"observed {observed['canary']:.4g} of {observed['requests']} requests"


def _gone(body: Mapping[str, Any]) -> str:
    return f"evacuated: {', '.join(body['evacuated'])}" if body["evacuated"] else ""


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def where(world: World) -> Table:
    """Where everything of a world is, for the end of `weir up`."""
    table = Table("region", "Consul API and UI", "ingress", "ingress admin", "control plane", box=None)
    for name in world.spec.names:
        at = world.address(name)
        ingress = at.ingress_https + (f"  {at.ingress_http}" if world.spec.http else "")
        table.add_row(name, f"{at.consul_http}/ui", ingress, at.ingress_admin, at.control_plane_http)
    return table
