"""`weir control-plane`: start the control plane of one region in the foreground.

Law: parses and hands over. Heavy imports (gRPC, protobuf) happen inside, so that `weir --help` stays fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Entry point of the group `weir.commands`."""
    app.command("control-plane", help="Run the control plane of one region (xDS for its Envoys).")(
        control_plane
    )


def control_plane(
    region: Annotated[str, typer.Option(help="Region whose proxies are served.")],
    ads_socket: Annotated[str, typer.Option(help="Unix socket for ADS; path under 100 bytes.")],
    consul: Annotated[str, typer.Option(help="Local agent; default CONSUL_HTTP_ADDR.")] = "",
    regions_dir: Annotated[Path, typer.Option(help="Folder of region files.")] = Path("regions"),
    services_dir: Annotated[Path, typer.Option(help="Folder of service files.")] = Path("services/catalog"),
    http: Annotated[str, typer.Option(help="host:port of /metrics, /healthz, /state.")] = "127.0.0.1:9102",
    source_address: Annotated[str, typer.Option(help="Send probes of other regions from this address.")] = "",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
) -> None:
    """Serve until SIGTERM. The Consul token comes from CONSUL_HTTP_TOKEN or CONSUL_HTTP_TOKEN_FILE."""
    import asyncio
    import gc
    import logging
    import os

    from mesh.controlplane.process import Settings, serve

    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    # What was made at start stays; without it in every full collection the collector's pauses are short.
    gc.collect()
    gc.freeze()
    settings = Settings(region, consul, regions_dir, services_dir, ads_socket, http, source_address)
    asyncio.run(serve(settings, os.environ))
