"""The failover figures, by the drills themselves: what an operator runs, at 200 requests/s.

Law: figures, no asserts, nothing measured here that the drill's own report doesn't say. A drill that is
unknown (no traffic, no steady state) gives rows without a value, which meet no goal.
"""

from __future__ import annotations

import asyncio
from typing import Any

from drills.session import Ask
from drills.session import run as run_drill
from mesh.world.wish import Wish
from mesh.world.world import World
from tests.bench.own_world import own_world

NAME = "drills"
RATE = "200"
CUT_OFF = "cut off"


class _Quiet:
    """Progress that tells phases only."""

    def phase(self, name: str, why: str) -> None:
        from regions.cli.output import talk

        talk().print(f"  {name}: {why}", markup=False)

    def tick(self, recorder: object) -> None:
        """Nothing: the rows are what is told."""

    def say(self, text: str) -> None:
        from regions.cli.output import talk

        talk().print(f"  {text}", markup=False)


def run() -> list[dict[str, Any]]:
    """About six minutes: a world of three regions, six drills one after another."""
    out: list[dict[str, Any]] = []
    with own_world(Wish(instances=2, canaries=1)) as world:
        out += _rows("planned evacuation", _drill(world, "region-evacuation"), failed="== 0")
        for mode, word, recovery in (
            ("kill", "killed", "<= 2 s"),
            ("freeze", "frozen", "<= 5 s"),
            ("cut-off", CUT_OFF, "<= 5 s"),
        ):
            report = _drill(world, "region-loss", mode=mode)
            out += _rows(f"region {word}", report, success=">= 99.95 %", recovery=recovery)
        for name, word in (
            ("control-plane-loss", "control plane lost"),
            ("consul-loss", "Consul leader lost"),
        ):
            out += _rows(word, _drill(world, name), failed="== 0", change="<= 2 s")
    return out


def _drill(world: World, name: str, **settings: str) -> dict[str, Any]:
    ask = Ask(name, {"rate": RATE, **settings})
    _, body = asyncio.run(run_drill(world, ask, _Quiet()))
    return body


def _rows(
    what: str,
    body: dict[str, Any],
    *,
    failed: str = "",
    success: str = "",
    recovery: str = "",
    change: str = "",
) -> list[dict[str, Any]]:
    named = f"{what} at {RATE} requests/s"
    rate = body["success_rate"]
    figures: list[tuple[str, float | None, str, str]] = [
        ("success", rate * 100 if rate is not None else None, "%", success),
        ("failed requests", body["failed"], "requests", failed),
        ("back over 99.9 % after", body.get("recovery_s"), "s", recovery),
        ("next weight change applied after", _got(body, "next_weight_change_s"), "s", change),
        ("dye deviation", _points(body["dye_deviation"]), "points", ""),
        ("verdict pass", float(body["verdict"] == "pass"), "", "== 1"),
    ]
    shown = {"next weight change applied after": change, "back over 99.9 % after": recovery or success}
    return [
        {"bench": NAME, "metric": f"{named}: {name}", "value": value, "unit": unit, "goal": goal}
        for name, value, unit, goal in figures
        if shown.get(name, True)
    ]


def _got(body: dict[str, Any], expectation: str) -> float | None:
    """What the report says of one expectation."""
    found = [row["got"] for row in body["expectations"] if row["what"] == expectation]
    return found[0] if found else None


def _points(deviation: float | None) -> float | None:
    return None if deviation is None else deviation * 100
