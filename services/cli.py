"""`weir executor`: start one model instance in the foreground.

Law: parses and hands over; the server is imported inside, so that `weir --help` stays fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from services.assembly import Stack


def register(app: typer.Typer) -> None:
    """Entry point of the group `weir.commands`."""
    app.command("executor", help="Run one model instance: OpenAI-compatible server, registered in Consul.")(
        executor
    )


def executor(
    instance: Annotated[str, typer.Option(help="Consul service id of this instance.")],
    listen: Annotated[str, typer.Option(help="host:port to serve on.")],
    region: Annotated[str, typer.Option(help="Region.")],
    stage: Annotated[str, typer.Option(help="stable or canary.")] = "stable",
    service: Annotated[str, typer.Option(help="Consul service name.")] = "chat",
    zone: Annotated[str, typer.Option(help="Availability zone.")] = "",
    version: Annotated[str, typer.Option(help="Version of what is served.")] = "",
    model: Annotated[
        str, typer.Option(help="Model: a name (weir model list) or a folder (echo, sim: any name).")
    ] = "",
    served_model_name: Annotated[str, typer.Option(help="Its name in the API (default: of the model).")] = "",
    tenant_class: Annotated[str, typer.Option(help="Tenant class it serves.")] = "",
    sidecar: Annotated[str, typer.Option(help="host:port of its sidecar's public listener.")] = "",
    consul: Annotated[str, typer.Option(help="Agent to register with; empty: don't register.")] = "",
    xds_token_sha256: Annotated[str, typer.Option(help="sha256 of the sidecar's ADS secret.")] = "",
    engine: Annotated[str, typer.Option(help="echo, sim, torch, vllm or openai.")] = "echo",
    token_cost_ms: Annotated[float, typer.Option(help="Cost of a token (echo).")] = 0.0,
    option: Annotated[list[str] | None, typer.Option("--option", help="Engine option NAME=VALUE.")] = None,
    fallback: Annotated[
        str, typer.Option(help="Second engine of the same model, or layerwise (torch without a KV cache).")
    ] = "",
    fallback_option: Annotated[
        list[str] | None, typer.Option("--fallback-option", help="Its option NAME=VALUE.")
    ] = None,
    fallback_rules: Annotated[str, typer.Option(help="YAML file of fallback rules (default: ours).")] = "",
    batch_size: Annotated[int, typer.Option(help="A batch leaves when so many wait.", min=1)] = 128,
    max_delay_ms: Annotated[float, typer.Option(help="Or when the oldest waited so long.", min=0)] = 50.0,
    concurrency: Annotated[int, typer.Option(help="Batches at once.", min=1)] = 4,
    queue_limit: Annotated[int, typer.Option(help="Requests that may wait; beyond: 429.", min=1)] = 1024,
    admin: Annotated[str, typer.Option(help="Loopback host:port of the admin verbs.")] = "",
    drain_deadline_s: Annotated[float, typer.Option(help="Longest drain.", min=0)] = 10.0,
    drain_settle_s: Annotated[
        float, typer.Option(help="Quiet time before leaving: so long the mesh may take to hear of it.", min=0)
    ] = 0.5,
    tenants: Annotated[str, typer.Option(help="YAML file of tenants and classes (default: ours).")] = "",
    debug: Annotated[bool, typer.Option(help="Also /echo.")] = False,
    device: Annotated[
        str, typer.Option(help="Device: UUID of `weir device list`, or cpu; empty: the best.")
    ] = "",
    device_memory: Annotated[
        str, typer.Option(help="Share of the device to claim (6GiB): who can't fit beside others is refused.")
    ] = "",
    run_dir: Annotated[str, typer.Option(help="Folder for the snapshot of the sleeping instance.")] = "",
    check: Annotated[
        bool, typer.Option("--check", help="Only say whether options and model make sense; start nothing.")
    ] = False,
) -> None:
    """Serve until SIGTERM, which drains. The Consul token comes from CONSUL_HTTP_TOKEN or …_FILE."""
    import asyncio
    import gc
    import logging
    from pathlib import Path

    from regions.cli.errors import UsageError
    from services import checked
    from services.assembly import Stack
    from services.batching.model import BatchingSettings
    from services.instance import Identity
    from services.main import Settings, serve
    from services.registration import Drain
    from services.telemetry.trace import in_logs
    from services.tenants_file import FILE, load

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    in_logs()
    table = load(Path(tenants) if tenants else FILE)
    model = checked.model_of(engine, model)
    options = {"token_cost_ms": f"{token_cost_ms:g}"} if engine == "echo" else {}
    stack = Stack(
        engine=engine,
        model=model,
        options=options | _options("--option", option),
        fallback=fallback,
        fallback_options=_options("--fallback-option", fallback_option),
        rules=fallback_rules,
        batching=BatchingSettings(
            batch_size=batch_size,
            max_delay_ms=max_delay_ms,
            concurrency=concurrency,
            queue_limit=queue_limit,
            classes=tuple(sorted(table.priorities, key=table.priorities.__getitem__)),
        ),
    )
    if consul and not sidecar:
        raise UsageError(
            "--consul", "needs --sidecar", "the address others are to call, such as 127.0.0.1:9000"
        )
    served = served_model_name or model.rstrip("/").rpartition("/")[2]
    identity = Identity(service, instance, region, zone, stage, version, served, tenant_class)
    checked.check(identity, stack, listen, admin, table.priorities)
    settings = Settings(
        identity=identity,
        listen=listen,
        sidecar=sidecar,
        consul=consul,
        token_sha256=xds_token_sha256,
        stack=stack,
        admin=admin,
        drain=Drain(drain_deadline_s, drain_settle_s),
        debug=debug,
        device=device,
        run_dir=run_dir,
        device_memory=_bytes(device_memory),
        tenants=table,
    )
    if check:
        _makes_sense(stack)
        return
    gc.freeze()
    asyncio.run(serve(settings))


def _makes_sense(stack: Stack) -> None:
    """Make the engines and throw them away. Raises UsageError for a model, option or rule without sense."""
    from random import Random

    from mesh.clock import SystemClock
    from services.assembly import assemble

    assemble(stack, SystemClock(), Random())  # noqa: S311 (jitter, no secret)


def _bytes(text: str) -> int:
    from regions.cli.errors import UsageError
    from services.kv.sizes import parse_size

    try:
        return parse_size(text) if text else 0
    except ValueError as error:
        raise UsageError(f"--device-memory {text!r}", str(error), "for example 6GiB") from None


def _options(flag: str, texts: list[str] | None) -> dict[str, str]:
    """NAME=VALUE texts as a mapping; the last one of a name wins. Raises UsageError."""
    from regions.cli.errors import UsageError

    options = {}
    for text in texts or []:
        name, sign, value = text.partition("=")
        if not sign:
            raise UsageError(f"{flag} {text!r}", "not NAME=VALUE", f"for example {flag} seed=7")
        options[name] = value
    return options
