"""`weir metrics config | rules | query`: what a Prometheus needs to watch a world.

Law: prints; starts nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Entry point of the group `weir.commands`."""
    metrics = typer.Typer(help="Prometheus configuration, rules and queries.", no_args_is_help=True)
    metrics.command("config")(config)
    metrics.command("rules")(rules)
    metrics.command("query")(query)
    app.add_typer(metrics, name="metrics")


def config(
    dir: Annotated[
        Path, typer.Option("--dir", "--world", envvar="WEIR_DIR", help="Folder of the world.")
    ] = Path(".weir"),
    rules_file: Annotated[str, typer.Option(help="Path for rule_files (see `weir metrics rules`).")] = "",
    every: Annotated[str, typer.Option(help="Scrape interval.")] = "5s",
) -> None:
    """prometheus.yml that scrapes every ingress, control plane and executor of the world."""
    import yaml

    from mesh.world import prometheus
    from mesh.world.addresses import EXECUTOR
    from mesh.world.executor_rules import Target
    from mesh.world.world import World

    world = World.load(dir)
    targets, executors = [], []
    for region in world.regions.names:
        where = world.address(region)
        ingress = where.ingress_metrics.removeprefix("http://").removesuffix("/metrics")
        targets.append((region, ingress, where.control_plane_http.removeprefix("http://")))
        executors += [
            Target(region, one.stage, one.id, f"{one.address}:{EXECUTOR}")
            for one in world.spec.members(region)
        ]
    body = prometheus.scrape_config(targets, executors, rules_file, every)
    typer.echo(yaml.safe_dump(body, sort_keys=False))


def rules() -> None:
    """Recording rules and alerts (a file for rule_files)."""
    import yaml

    from mesh.world import prometheus

    typer.echo(yaml.safe_dump(prometheus.rules(), sort_keys=False, width=1000))


def query(
    name: Annotated[str, typer.Argument(help="dye, tokens, first-token, ...; empty: dye.")] = "dye",
) -> None:
    """One query: how far the dye is off, or a row of the dashboard per tenant, region and stage."""
    from mesh.world import prometheus
    from regions.cli.errors import UsageError

    if name not in prometheus.QUERIES:
        raise UsageError(f"query {name!r}", "unknown", f"there are: {', '.join(prometheus.QUERIES)}")
    typer.echo(prometheus.QUERIES[name])
