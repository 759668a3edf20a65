"""Where the files of a world stand.

Law: paths only, nothing is read or made. Sockets live in a short runtime folder because a Unix socket's
path ends at 107 bytes, and world folders may be deep.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MAX_SOCKET_PATH = 100
"""Bytes; as many as the control plane takes (mesh/xds/grpc_io.py)."""
MARKER = "WEIR_WORLD"
"""Environment variable that every process of a world carries: the absolute world folder."""


@dataclass(frozen=True, slots=True)
class WorldLayout:
    """folder: absolute world folder. runtime: absolute folder of its sockets."""

    folder: Path
    runtime: Path

    @property
    def description(self) -> Path:
        return self.folder / "world.json"

    @property
    def lock(self) -> Path:
        """Held by `up` and `down` while they work."""
        return self.folder / "world.lock"

    @property
    def secrets(self) -> Path:
        return self.folder / "secrets.json"

    @property
    def tokens(self) -> Path:
        """One file per role with its Consul token, when ACLs are on."""
        return self.folder / "tokens"

    @property
    def tls(self) -> Path:
        return self.folder / "tls"

    @property
    def ca_file(self) -> Path:
        """What a client must trust to reach the ingress by HTTPS."""
        return self.tls / "ca.pem"

    @property
    def ingress_sds(self) -> Path:
        return self.tls / "ingress-sds.json"

    @property
    def rows(self) -> Path:
        """Region files of this world, in the format of regions/, for the control planes."""
        return self.folder / "rows"

    def region(self, name: str) -> RegionLayout:
        return RegionLayout(self, name)


@dataclass(frozen=True, slots=True)
class RegionLayout:
    """Files of one region."""

    world: WorldLayout
    name: str

    @property
    def folder(self) -> Path:
        return self.world.folder / "regions" / self.name

    @property
    def facts(self) -> Path:
        """region.json: what Terraform and people read."""
        return self.folder / "region.json"

    @property
    def lock(self) -> Path:
        """Held by the supervisor for as long as it lives; its pid stands in it."""
        return self.folder / "supervisor.lock"

    @property
    def consul_config(self) -> Path:
        return self.folder / "consul.json"

    @property
    def consul_data(self) -> Path:
        return self.folder / "consul"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    def log(self, process: str) -> Path:
        return self.logs / f"{process}.log"

    def bootstrap(self, process: str) -> Path:
        return self.folder / "envoy" / f"{process}.json"

    @property
    def run(self) -> Path:
        """What running executors leave: snapshots of those that sleep."""
        return self.folder / "run"

    @property
    def ads_socket(self) -> Path:
        return self.world.runtime / f"{self.name}.sock"

    @property
    def control_socket(self) -> Path:
        return self.world.runtime / f"{self.name}.ctl"


def runtime_folder(folder: Path, environ: Mapping[str, str], uid: int, longest_region: int) -> Path:
    """A short folder for the sockets of the world at `folder`, named after a hash of it.

    longest_region: length of the longest region name, so that every socket path stays short enough.
    """
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:10]
    base = environ.get("XDG_RUNTIME_DIR", "")
    own = Path(base) / f"weir-{digest}"
    if base.startswith("/") and len(os.fsencode(own)) + longest_region + len("/.sock") <= MAX_SOCKET_PATH:
        return own
    return Path("/tmp") / f"weir-{uid}-{digest}"  # noqa: S108 - checked for its owner in private_folder
