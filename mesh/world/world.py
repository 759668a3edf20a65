"""A local world as others see it: its regions, addresses, CA, tokens and controls.

Law: reads the world's own files and nothing else; starts, stops and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from mesh.world import files, lock
from mesh.world.addresses import RegionAddresses
from mesh.world.consul_config import ConsulSecrets
from mesh.world.control import RegionControl
from mesh.world.layout import WorldLayout
from mesh.world.spec import SpecError, WorldSpec, spec_from_json, spec_to_json
from regions.cli.errors import WeirError
from regions.model import RegionSet

DEFAULT_FOLDER = Path(".weir")
SCHEMA_VERSION = 1


class NoWorld(WeirError):
    """There is no world in this folder, or its description can't be read."""


@dataclass(frozen=True, slots=True)
class World:
    """A description that was loaded. It says what the world is, not whether it runs (see `running`)."""

    layout: WorldLayout
    spec: WorldSpec
    secrets: ConsulSecrets = field(repr=False)

    @classmethod
    def load(cls, folder: Path | str = DEFAULT_FOLDER) -> Self:
        """Raises NoWorld when the folder holds none."""
        path = Path(folder).absolute()
        found = load_description(path)
        if found is None:
            raise NoWorld(str(path), "there is no world here", f"weir up --dir {folder}")
        layout, spec = found
        keys = files.read_json(layout.secrets)
        if keys is None:
            raise NoWorld(str(layout.secrets), "missing or broken", f"weir down --purge --dir {folder}")
        return cls(layout, spec, ConsulSecrets(**keys))

    @property
    def folder(self) -> Path:
        return self.layout.folder

    @property
    def regions(self) -> RegionSet:
        """The rows of the world's regions; their gateways are the loopback addresses."""
        return self.spec.regions

    @property
    def ca_file(self) -> Path:
        """What a client must trust for the ingress certificates."""
        return self.layout.ca_file

    @property
    def token(self) -> str:
        """The operator's Consul token; empty when the world runs without ACLs."""
        return self.token_of("operator")

    def token_of(self, role: str) -> str:
        """Consul token of a role of mesh.consul.acl; empty when the world runs without ACLs."""
        return self.secrets.roles[role] if self.spec.acl else ""

    def address(self, region: str) -> RegionAddresses:
        """Raises NoWorld for a region that the world doesn't have."""
        self._check(region)
        return self.spec.addresses(region)

    def control_socket(self, region: str) -> Path:
        self._check(region)
        return self.layout.region(region).control_socket

    def control(self, region: str) -> RegionControl:
        return RegionControl(self, region)

    def supervisor(self, region: str) -> int | None:
        """Pid of the region's supervisor while it lives."""
        self._check(region)
        return lock.holder(self.layout.region(region).lock)

    @property
    def running(self) -> tuple[str, ...]:
        """Regions whose supervisor lives."""
        return tuple(name for name in self.spec.names if self.supervisor(name) is not None)

    def _check(self, region: str) -> None:
        if region not in self.spec.names:
            known = ", ".join(self.spec.names)
            raise NoWorld(f"region {region}", f"not in the world at {self.folder}", f"it has {known}")


def load_description(folder: Path) -> tuple[WorldLayout, WorldSpec] | None:
    """Layout and spec from world.json, or None when it isn't there. Raises NoWorld when it is broken."""
    path = folder / "world.json"
    if not path.exists():
        return None
    body = files.read_json(path)
    try:
        if body["schema_version"] != SCHEMA_VERSION:
            raise SpecError(f"schema_version {body['schema_version']} is not {SCHEMA_VERSION}")
        return WorldLayout(folder, Path(body["runtime"])), spec_from_json(body["spec"])
    except (TypeError, KeyError, SpecError) as error:
        raise NoWorld(str(path), f"broken: {error}", f"weir down --purge --dir {folder}") from error


def save_description(layout: WorldLayout, spec: WorldSpec) -> None:
    body = {"schema_version": SCHEMA_VERSION, "runtime": str(layout.runtime), "spec": spec_to_json(spec)}
    files.write_json(layout.description, body)
