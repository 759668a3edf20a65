"""The options of `weir executor`: their names, their defaults, what their help says.

Law: declares; what the words mean together is services/told.py's. Imports nothing heavy: `weir --help` reads
it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from inspect import Parameter, Signature
from typing import Annotated, Any, get_type_hints

import typer
import typer.core

_SAID = ("COMMANDLINE", "ENVIRONMENT")
WHO, MODEL, SECOND = "Who it is", "Model and engine", "Second engine"
QUEUE, MESH, MEMORY = "Scheduler", "Addresses and mesh", "Devices and hot pool"


def _opt(panel: str, text: str, *names: str, least: float | None = None) -> Any:
    return typer.Option(*names, help=text, min=least, rich_help_panel=panel)


def _list_settings(asked: bool) -> None:
    if not asked:
        return
    from services.tuning_table import show

    show()
    raise typer.Exit


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What was said on the command line, unchecked. given: names of the fields that were said there."""

    given: frozenset[str] = frozenset()

    instance: Annotated[str, _opt(WHO, "Consul service id of this instance (needed).")] = ""
    region: Annotated[str, _opt(WHO, "Region (needed).")] = ""
    stage: Annotated[str, _opt(WHO, "stable or canary.")] = "stable"
    service: Annotated[str, _opt(WHO, "Consul service name.")] = "chat"
    zone: Annotated[str, _opt(WHO, "Availability zone.")] = ""
    version: Annotated[str, _opt(WHO, "Version of what is served.")] = ""
    tenant_class: Annotated[str, _opt(WHO, "Tenant class it serves.")] = ""

    model: Annotated[
        str, _opt(MODEL, "Model: a name (weir model list) or a folder (echo, sim: any name).")
    ] = ""
    served_model_name: Annotated[str, _opt(MODEL, "Its name in the API (default: of the model).")] = ""
    engine: Annotated[str, _opt(MODEL, "echo, sim, torch, vllm or openai.")] = "echo"
    option: Annotated[list[str] | None, _opt(MODEL, "Engine option NAME=VALUE.", "--option")] = None
    token_cost_ms: Annotated[float, _opt(MODEL, "Cost of a token (echo).")] = 0.0

    fallback: Annotated[
        str, _opt(SECOND, "Second engine of the same model, or layerwise (torch without a KV cache).")
    ] = ""
    fallback_option: Annotated[
        list[str] | None, _opt(SECOND, "Its option NAME=VALUE.", "--fallback-option")
    ] = None
    fallback_rules: Annotated[str, _opt(SECOND, "YAML file of fallback rules (default: ours).")] = ""

    batch_size: Annotated[int, _opt(QUEUE, "A batch leaves when so many wait.", least=1)] = 128
    max_delay_ms: Annotated[float, _opt(QUEUE, "Or when the oldest waited so long.", least=0)] = 50.0
    concurrency: Annotated[int, _opt(QUEUE, "Batches at once.", least=1)] = 4
    queue_limit: Annotated[int, _opt(QUEUE, "Requests that may wait; beyond: 429.", least=1)] = 1024
    tenants: Annotated[str, _opt(QUEUE, "YAML file of tenants and classes (default: ours).")] = ""

    listen: Annotated[str, _opt(MESH, "host:port to serve on.")]
    admin: Annotated[str, _opt(MESH, "Loopback host:port of the admin verbs.")] = ""
    sidecar: Annotated[str, _opt(MESH, "host:port of its sidecar's public listener.")] = ""
    consul: Annotated[str, _opt(MESH, "Agent to register with; empty: don't register.")] = ""
    xds_token_sha256: Annotated[str, _opt(MESH, "sha256 of the sidecar's ADS secret.")] = ""
    drain_deadline_s: Annotated[float, _opt(MESH, "Longest drain.", least=0)] = 10.0
    drain_settle_s: Annotated[
        float, _opt(MESH, "Quiet time before leaving: so long the mesh may take to hear of it.", least=0)
    ] = 0.5

    device: Annotated[str, _opt(MEMORY, "Device: UUID of `weir device list`, or cpu; empty: the best.")] = ""
    devices: Annotated[
        str, _opt(MEMORY, "fake:SEED[:COUNT]: pretended GPUs, to try the pool; it all runs on the CPU.")
    ] = ""
    device_memory: Annotated[
        str, _opt(MEMORY, "Share of the device to claim (6GiB): who can't fit beside others is refused.")
    ] = ""
    run_dir: Annotated[str, _opt(MEMORY, "Folder for the snapshot of the sleeping instance.")] = ""
    from_snapshot: Annotated[
        str,
        _opt(MEMORY, "Become the instance of this snapshot: who it is, engine, model, options; verified."),
    ] = ""

    tune: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other number: NAME=VALUE, as in pool.busy=0.9 (see --settings)."),
    ] = None
    settings: Annotated[
        bool,
        typer.Option(
            "--settings",
            help="List what --set takes: names, defaults, units.",
            is_eager=True,
            callback=_list_settings,
        ),
    ] = False
    debug: Annotated[bool, typer.Option(help="Also /echo.")] = False
    check: Annotated[
        bool, typer.Option("--check", help="Only say whether options and model make sense; start nothing.")
    ] = False


class Grouped(typer.core.TyperCommand):
    """A command whose help has its options under the names of their panels, plain as all of weir's."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if (row := param.get_help_record(ctx)) is not None:
                panels.setdefault(getattr(param, "rich_help_panel", None) or "Other", []).append(row)
        for name, rows in panels.items():
            with formatter.section(name):
                formatter.write_dl(rows)


def taking(command: Callable[[Told], None]) -> Callable[..., None]:
    """`command` as typer takes it: with one parameter for each option, and the command's own help."""

    def taken(ctx: typer.Context, **values: Any) -> None:
        said = {name for name in values if getattr(ctx.get_parameter_source(name), "name", "") in _SAID}
        command(Told(given=frozenset(said), **values))

    hints = get_type_hints(Told, include_extras=True)
    named = [Parameter("ctx", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
    named += [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=_default(field), annotation=hints[field.name])
        for field in fields(Told)
        if field.name != "given"
    ]
    taken.__signature__ = Signature(named)  # type: ignore[attr-defined]
    taken.__doc__ = command.__doc__
    return taken


def _default(field: Any) -> Any:
    return Parameter.empty if field.default is MISSING else field.default
