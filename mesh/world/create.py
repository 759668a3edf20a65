"""Making, keeping and mending a world's folder: description, secrets, certificates, region rows.

Law: files only, nothing is started. May be repeated: what is there and good stays as it is.
"""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import importlib.util
import os
import secrets
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from intentions.load import default_file
from mesh.consul.acl import roles_for, write_tokens
from mesh.world import certs, files, ports, wish
from mesh.world.addresses import FIRST_WORLD
from mesh.world.engines import ECHO, ENGINES
from mesh.world.layout import WorldLayout, runtime_folder
from mesh.world.spec import SERVICE, SpecError, WorldSpec, region_to_json
from mesh.world.wish import Wish
from mesh.world.world import NoWorld, World, load_description, save_description
from regions.cli.errors import UsageError
from regions.load import default_dir, load_regions
from regions.model import RegionSet, RegionSetError

OURS = ("world.json", "secrets.json", "tokens", "tls", "rows", "regions", "world.lock")
"""All that a world writes into its folder, in the order in which a purge takes it away."""


@contextmanager
def settled(folder: Path, want: Wish, regions_dir: Path | None) -> Iterator[World]:
    """The world to bring up, its files all in place. While the block runs, a new world's number is claimed.

    The caller holds the world's lock. Raises Refused, UsageError, PortTaken, WeirError.
    """
    files.check_space(folder)
    files.private_folder(folder)
    with _explained():
        rows = load_regions(regions_dir or default_dir())
        found = _load_or_mend(folder)
        if found is not None:
            yield _keep(*found, want, rows)
            return
        regions = rows.only(want.regions) if want.regions is not None else rows
        # Checks the wish before a number is sought; the number itself is decided below.
        draft = wish.fresh(want, rows, want.subnet or FIRST_WORLD, _data(want.engine))
    with ports.chosen(want.subnet, len(regions.names), draft.total, http=draft.http) as number:
        spec = wish.fresh(want, rows, number, _data(want.engine))
        runtime = runtime_folder(folder, os.environ, os.getuid(), max(map(len, spec.names)))
        yield _write(WorldLayout(folder, runtime), spec)


def _keep(layout: WorldLayout, old: WorldSpec, want: Wish, rows: RegionSet) -> World:
    world = World.load(layout.folder)
    kept = any(layout.region(name).consul_data.exists() for name in old.names)
    spec = wish.settled(old, want, rows, running=world.running, kept=kept)
    if spec.engine != old.engine:
        spec = replace(spec, services_dir=_data(spec.engine)["services_dir"])
    return _write(layout, spec)


def _write(layout: WorldLayout, spec: WorldSpec) -> World:
    files.private_folder(layout.runtime)
    _write_certificate(layout, spec)
    for region in spec.regions.regions:
        text = yaml.safe_dump(region_to_json(region), sort_keys=False)
        files.write(layout.rows / f"{region.name}.yaml", text)
    _write_secrets(layout, spec)
    # Last: a folder with a description is a whole one.
    save_description(layout, spec)
    return World.load(layout.folder)


def _write_certificate(layout: WorldLayout, spec: WorldSpec) -> None:
    now = dt.datetime.now(dt.UTC)
    if spec.tls_cert:
        certs.write_all(layout, certs.given(Path(spec.tls_cert), Path(spec.tls_key)))
        return
    addresses = [spec.addresses(name).ingress for name in spec.names]
    old = certs.load(layout)
    if old is None or not certs.usable(old, addresses, now):
        certs.write_all(layout, certs.self_made(addresses, now))


def _new_secrets(*, acl: bool) -> dict[str, Any]:
    gossip = base64.b64encode(secrets.token_bytes(32)).decode()
    if not acl:
        return {"gossip": gossip}
    roles = {role: str(uuid.uuid4()) for role in roles_for((SERVICE,))}
    return {"gossip": gossip, "management": str(uuid.uuid4()), "roles": roles}


def _write_secrets(layout: WorldLayout, spec: WorldSpec) -> None:
    """Once for the life of the world's Consul data: the gossip key and the tokens are kept in it."""
    body = files.read_json(layout.secrets)
    if body is None or bool(body.get("roles")) != spec.acl:
        body = _new_secrets(acl=spec.acl)
        files.write_json(layout.secrets, body, mode=0o600)
    if spec.acl:
        write_tokens(layout.tokens, body["roles"])


def _load_or_mend(folder: Path) -> tuple[WorldLayout, WorldSpec] | None:
    """The description; what a crash left broken is cleared away, so that a new world takes its place."""
    clear_parts(folder)
    try:
        found = load_description(folder)
        if found is not None:
            World.load(folder)
        return found
    except NoWorld:
        forget(folder, OURS[:-1])
        return None


def clear_parts(folder: Path) -> None:
    """Remove temporary files of writes that a crash cut off. Only sensible under the world's lock."""
    for part in folder.rglob(".*.part"):
        part.unlink(missing_ok=True)


def forget(folder: Path, names: Sequence[str] = OURS) -> None:
    """Remove what a world wrote into its folder; strangers' files stay, and with them the folder."""
    for name in names:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _data(engine: str | None) -> dict[str, str]:
    """Where the world's processes read what isn't kept in its own folder."""
    catalog = ENGINES.get(engine or ECHO, ENGINES[ECHO]).catalog
    return {
        "services_dir": str(default_services_dir(catalog)),
        "intentions_file": str(default_file().absolute()),
    }


def default_services_dir(catalog: str = "catalog") -> Path:
    """`./services/catalog` (or that folder) when it has files, else the one that ships with weir."""
    here = Path("services", catalog).absolute()
    if any(here.glob("*.yaml")):
        return here
    found = importlib.util.find_spec("services")
    places = list(found.submodule_search_locations or ()) if found is not None else []
    if not places:
        raise UsageError("services/catalog", "not found", "run weir where services/catalog is")
    return Path(places[0]) / catalog


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except (SpecError, RegionSetError) as error:
        raise UsageError("weir up", str(error), "see weir up --help") from error
