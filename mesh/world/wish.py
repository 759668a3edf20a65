"""What the caller of `weir up` asked for, against what is there: the spec to bring up, or why not.

Law: pure. None in a Wish means "not said": then what the world has stays, or the default holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from mesh.world.engines import ECHO, defaults
from mesh.world.spec import PINNED, WorldSpec, differences
from regions.cli.errors import Refused
from regions.model import RegionSet


@dataclass(frozen=True, slots=True)
class Wish:
    """Options of `weir up`; names and meaning as in WorldSpec. subnet is WorldSpec.number."""

    regions: tuple[str, ...] | None = None
    instances: int | None = None
    canaries: int | None = None
    http: bool | None = None
    acl: bool | None = None
    engine: str | None = None
    model: str | None = None
    options: tuple[str, ...] | None = None
    settings: tuple[str, ...] | None = None
    token_cost_ms: float | None = None
    subnet: int | None = None
    tls_cert: str | None = None
    tls_key: str | None = None

    @property
    def said(self) -> dict[str, Any]:
        """WorldSpec fields that were given, except regions."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "regions"}
        given["number"] = given.pop("subnet")
        return {name: value for name, value in given.items() if value is not None}


def fresh(wish: Wish, rows: RegionSet, number: int, data: Mapping[str, str]) -> WorldSpec:
    """The spec of a new world; data: its services_dir and intentions_file.

    Raises RegionSetError or SpecError when the wish makes no sense.
    """
    regions = rows.only(wish.regions) if wish.regions is not None else rows
    usual = defaults(wish.engine or ECHO)
    return WorldSpec(**{**usual, **wish.said, **data, "number": number}, regions=regions)


def settled(
    old: WorldSpec, wish: Wish, rows: RegionSet, *, running: tuple[str, ...], kept: bool
) -> WorldSpec:
    """The spec to bring up where a world is already. running: regions that run; kept: Consul data is there.

    Raises Refused when the wish differs from what runs, or from what the kept data was made for.
    """
    names = tuple(sorted(wish.regions)) if wish.regions is not None else old.names
    new = replace(old, **_of_engine(old, wish, running=bool(running)), **wish.said)
    if names != old.names or not running:
        # Nothing of the old rows is in use: take them as the files have them now.
        new = replace(new, regions=rows.only(names) if set(names) <= set(rows.names) else old.regions)
    changed = differences(old, new)
    if running and changed:
        raise _refused(changed, f"it runs ({', '.join(running)})", "weir down first, or leave it as it is")
    if kept and (pinned := {k: v for k, v in changed.items() if k in PINNED}):
        raise _refused(pinned, "its Consul data was made so", "weir down --purge first; it forgets the KV")
    return new


def _of_engine(old: WorldSpec, wish: Wish, *, running: bool) -> dict[str, Any]:
    """What goes with another engine: model, options and numbers of the old one mean nothing to it.

    Where nothing runs, the same engine named again has no model, option or setting but those said now: there
    must be a way to be rid of one that was wrong.
    """
    if wish.engine is None or (wish.engine == old.engine and running):
        return {}
    usual: dict[str, Any] = {"model": "", "options": (), "settings": ()}
    if wish.engine != old.engine:
        usual |= defaults(wish.engine)
    return {name: value for name, value in usual.items() if name not in wish.said}


def _refused(changed: dict[str, tuple[str, str]], why: str, way_out: str) -> Refused:
    said = "; ".join(f"{name} is {old}, asked for {new}" for name, (old, new) in changed.items())
    return Refused("this world", f"has another shape and {why}: {said}", way_out)
