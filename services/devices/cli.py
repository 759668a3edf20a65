"""`weir device list`: what an instance of this machine can be bound to.

Law: asks the door, prints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from services.devices.door import Device

app = typer.Typer(no_args_is_help=True, help="Devices of this machine: GPUs, MIG slices, the CPU.")
GIB = 2**30


def register(root: typer.Typer) -> None:
    """Entry point `55_device` of the group weir.commands."""
    root.add_typer(app, name="device")


@app.callback()
def _group() -> None:
    """A group even with one command."""


@app.command("list")
def list_(
    cpu: Annotated[bool, typer.Option("--cpu", help="The CPU, also where there are GPUs.")] = False,
    kind: Annotated[
        str, typer.Option("--devices", help="fake:SEED[:COUNT]: pretended GPUs, as weir executor takes them.")
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """GPUs and their MIG slices; the CPU where there is no GPU. Load, memory, processes."""
    from regions.cli.output import emit_json, table, talk
    from services.devices import checkpoint
    from services.devices.here import devices

    found = devices(_kind(kind, cpu=cpu))
    try:
        seen = found.list()
    finally:
        found.close()
    _, why_not = checkpoint.available()
    if json:
        body = {"kind": found.kind, "devices": [as_json(device) for device in seen]}
        emit_json(body | {"process_checkpoints": not why_not, "why_no_checkpoints": why_not or None})
        return
    table().print(_table(seen))
    if found.kind == "fake":
        talk().print("These devices are fake: what is bound to one runs on the CPU.", style="yellow")


def _kind(kind: str, *, cpu: bool) -> str:
    from regions.cli.errors import UsageError

    if kind and cpu:
        raise UsageError("--cpu", "and --devices are two answers to one question", "give one of them")
    if kind and not kind.startswith("fake"):
        raise UsageError(f"--devices {kind!r}", "not fake:SEED[:COUNT]", "leave it out for the machine's own")
    return "cpu" if cpu else kind


def as_json(device: Device) -> dict[str, Any]:
    """Bytes and shares."""
    from dataclasses import asdict

    body = asdict(device) | {"load": round(device.load, 4), "memory_free": device.memory_free}
    body["slices"] = [asdict(part) | {"memory_free": part.memory_free} for part in device.slices]
    return body


def _table(seen: tuple[Device, ...]) -> Any:
    from rich.table import Table

    from services.devices.door import places

    shown = Table("index", "uuid", "name", "load", "memory", "free", "processes", box=None)
    for device in places(seen):
        shown.add_row(
            str(device.index),
            device.uuid,
            device.name,
            "-" if device.utilisation is None else f"{device.utilisation:.0%}",
            f"{device.memory_total / GIB:.1f} GiB",
            f"{device.memory_free / GIB:.1f} GiB",
            str(len(device.processes)),
        )
    return shown
