"""Drills and reports as text for a terminal.

Law: formats, decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from drills.model import Scenario
from drills.page import DASH, got, number, percent, seconds
from drills.scenario_file import PARAMETERS, Draft

COLOURS = {"pass": "green", "fail": "bold red", "unknown": "yellow"}


def catalogue(
    drafts: Sequence[Draft], running: Mapping[str, str] | None, recent: Sequence[Mapping[str, Any]]
) -> Group:
    """The table of `weir drill list`. recent: JSON of reports, newest last."""
    drills = Table("drill", "what happens", "modes", box=None, pad_edge=False)
    for draft in drafts:
        drills.add_row(draft.name, draft.file.title, ", ".join(draft.modes) or DASH)
    parts: list[RenderableType] = [drills]
    parts.append("\nparameters (--set NAME=VALUE): " + ", ".join(PARAMETERS))
    if running:
        told = ", ".join(f"{k} {v}" for k, v in sorted(running.items()))
        parts.append(f"\nrunning now: {escape(told)}")
    if recent:
        past = Table("report", "verdict", "success", "recovery", "failed", box=None, pad_edge=False)
        for body in recent:
            word = str(body["verdict"])
            rate, back = percent(body["success_rate"], 3), seconds(body["recovery_s"])
            past.add_row(body["id"], f"[{COLOURS[word]}]{word}[/]", rate, back, number(body["failed"]))
        parts += ["", past]
    return Group(*parts)


def plan(scenario: Scenario) -> str:
    """What is about to happen, before it does."""
    phases = scenario.phases
    wanted = ", ".join(f"{e.kind.value} {e.wanted}" for e in scenario.expectations)
    mode = f" ({scenario.mode})" if scenario.mode else ""
    lines = [
        f"{scenario.title}{mode}: {', '.join(a.do for a in scenario.actions)} on {scenario.target}",
        f"load     {scenario.load.rate:g} requests/s to the ingresses: {scenario.load.ingresses.value}",
        *(f"         {told}" for told in (scenario.fitted.told if scenario.fitted else ())),
        f"times    load {phases.load_s:g} s, fault {phases.hold_s:g} s, settle {phases.settle_s:g} s",
        f"expected {wanted}",
        f"healing  {scenario.healing}",
    ]
    return "\n".join(lines)


def summary(body: Mapping[str, Any]) -> Group:
    """A report's verdict and figures."""
    word = str(body["verdict"])
    table = Table("expectation", "wanted", "got", "verdict", "why", box=None, pad_edge=False)
    for row in body["expectations"]:
        colour = COLOURS[row["verdict"]]
        measured = got(row["what"], row["got"])
        table.add_row(
            row["what"], row["wanted"], measured, f"[{colour}]{row['verdict']}[/]", escape(row["reason"])
        )
    parts = body["mttr_parts"]
    told = ", ".join(f"{name} {seconds(value)}" for name, value in parts.items())
    about = f"{body['title']} ({body['target']}): {body['reason']}"
    head = f"[{COLOURS[word]}]{word.upper()}[/] {escape(about)}"
    figures = (
        f"{number(body['requests'])} requests, {number(body['failed'])} failed, "
        f"{number(body['retried'])} retried, {number(body['streams_cut'])} streams cut; "
        f"MTTR {seconds(body['mttr_s'])} ({told})"
    )
    left_out = [f"left out: {escape(told)}" for told in body.get("fitted", {}).get("left_out", ())]
    return Group(head, "", table, *left_out, "", figures, f"report {body['report']}")
