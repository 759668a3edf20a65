"""region.json: what Terraform and people read about a region that was brought up.

Law: one small file per region, whole or not there; it is a note, the supervisor is the truth.
"""

from __future__ import annotations

from typing import Any

from mesh.world import files
from mesh.world.layout import RegionLayout
from mesh.world.spec import WorldSpec


def facts(spec: WorldSpec, paths: RegionLayout, *, ready: bool) -> dict[str, Any]:
    """{name, consul, ingress, ca_file, ready}"""
    where = spec.addresses(paths.name)
    return {
        "name": paths.name,
        "consul": where.consul_http,
        "ingress": where.ingress_https,
        "ca_file": str(paths.world.ca_file),
        "ready": ready,
    }


def write(spec: WorldSpec, paths: RegionLayout, *, ready: bool) -> None:
    files.write_json(paths.facts, facts(spec, paths, ready=ready))


def remove(paths: RegionLayout) -> None:
    paths.facts.unlink(missing_ok=True)
