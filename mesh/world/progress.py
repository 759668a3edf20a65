"""What a person sees while regions come up: one line per region with its parts.

Law: turns statuses into text and prints it on stderr; decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.table import Table

from mesh.world.control import RegionStatus
from mesh.world.plan import CONSUL, CONTROL_PLANE, INGRESS, MESH_GATEWAY
from mesh.world.process import State


@dataclass(frozen=True, slots=True)
class Parts:
    """How far a region is: (ready, all) per part."""

    consul: tuple[int, int]
    control: tuple[int, int]
    gateways: tuple[int, int]
    executors: tuple[int, int]
    sidecars: tuple[int, int]
    held: tuple[str, ...] = ()

    def __str__(self) -> str:
        pairs = (
            ("Consul", self.consul),
            ("control plane", self.control),
            ("gateways", self.gateways),
            ("executors", self.executors),
            ("sidecars", self.sidecars),
        )
        return ", ".join(f"{name} {done}/{of}" for name, (done, of) in pairs)


def parts(status: RegionStatus) -> Parts:
    """Counts of a region's status."""
    rows = status.processes
    others = [n for n in rows if n not in (CONSUL, CONTROL_PLANE, INGRESS, MESH_GATEWAY)]

    def count(names: list[str]) -> tuple[int, int]:
        there = [name for name in names if name in rows]
        return sum(rows[name].state is State.READY for name in there), len(there)

    return Parts(
        consul=count([CONSUL]),
        control=count([CONTROL_PLANE]),
        gateways=count([INGRESS, MESH_GATEWAY]),
        executors=count([n for n in others if not n.endswith("-sidecar")]),
        sidecars=count([n for n in others if n.endswith("-sidecar")]),
        held=tuple(n for n, row in rows.items() if row.state is State.HELD),
    )


class Progress:
    """A live table on a terminal; elsewhere one line when a region begins and one when it is ready."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._said: dict[str, str] = {}

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=False)
            self._live.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.__exit__(None, None, None)

    def show(self, regions: Mapping[str, RegionStatus | None], elapsed_s: float) -> None:
        """regions: status of each, None while its supervisor doesn't answer yet."""
        if self._live is not None:
            self._live.update(_table(regions, elapsed_s), refresh=True)
            return
        for name, status in regions.items():
            said = "ready" if status is not None and status.ready else "starting"
            if self._said.get(name) != said:
                self._said[name] = said
                detail = f" after {elapsed_s:.1f} s" if said == "ready" else ""
                self._console.print(f"{name}: {said}{detail}", soft_wrap=True)


def _table(regions: Mapping[str, RegionStatus | None], elapsed_s: float) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1))
    for name, status in regions.items():
        if status is None:
            table.add_row("…", name, "supervisor starting")
        else:
            mark = "[green]✓[/]" if status.ready else "…"
            table.add_row(mark, name, "ready" if status.ready else str(parts(status)))
    table.add_row("", "", f"[dim]{elapsed_s:.1f} s[/]")
    return table
