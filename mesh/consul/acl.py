"""ACLs: the shipped policies, one token per role, and how they get into Consul.

Law: the policies are data (policies/*.hcl); this module fills in service names and makes Consul agree, and
may be run again at any time. Secrets are the caller's or made up here (uuid4: from the system's random
source), stand in files of mode 0600 and in no log, error or repr.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from mesh.consul.client import Consul
from mesh.consul.errors import ConsulError, Forbidden
from regions.cli.errors import Refused

ROLES = ("agent", "replication", "control-plane", "ingress", "mesh-gateway", "operator", "drill")
"""Roles there is one of. Beside them each service has `instance-<service>` (`instance_role`)."""

ANONYMOUS_TOKEN = "00000000-0000-0000-0000-000000000002"  # noqa: S105 (Consul's fixed id, no secret)
_INSTANCE = "instance-"


def instance_role(service: str) -> str:
    return f"{_INSTANCE}{service}"


def roles_for(services: Iterable[str]) -> tuple[str, ...]:
    """Every role of a mesh that serves these services."""
    return (*ROLES, *(instance_role(name) for name in services))


def rules(role: str, services: Sequence[str]) -> str:
    """The policy of a role, in Consul's HCL. Pure but for reading the package's own files."""
    if role.startswith(_INSTANCE):
        return Template(_file("instance")).substitute(service=role.removeprefix(_INSTANCE))
    each = f"{role}.each-service"
    parts = [_file(role)]
    if files("mesh.consul").joinpath(f"policies/{each}.hcl").is_file():
        parts += [Template(_file(each)).substitute(service=name) for name in services]
    return "\n".join(parts)


async def bootstrap(consul: Consul) -> str:
    """The secret of the first management token. Raises Refused when that was done before."""
    try:
        raw = await consul.exchange("PUT", "/v1/acl/bootstrap", accept=(200,))
    except Forbidden as error:
        raise Refused(
            "ACL bootstrap",
            error.why,
            "use the management token that was made then, or reset it as Consul's manual describes",
        ) from error
    return str(json.loads(raw.text)["SecretID"])


async def provision(
    consul: Consul, services: Sequence[str], secrets: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Policies and one token per role; gives role -> secret. Idempotent for roles whose secret is given.

    consul: with a management token, an agent of the primary datacenter (tokens are global, replicated to the
    others within seconds). secrets: role -> UUID to use, e.g. from `load_tokens`; others are made up.
    """
    given = dict(secrets or {})
    await _ensure_policy(consul, "anonymous", rules("anonymous", services))
    await _attach(consul, ANONYMOUS_TOKEN, "anonymous")
    tokens: dict[str, str] = {}
    for role in roles_for(services):
        await _ensure_policy(consul, role, rules(role, services))
        tokens[role] = given.get(role) or str(uuid.uuid4())
        await _ensure_token(consul, role, tokens[role])
    return tokens


async def set_agent_token(consul: Consul, secret: str) -> None:
    """Give a running agent its own token; kept over restarts only with enable_token_persistence."""
    body = json.dumps({"Token": secret})
    await consul.exchange("PUT", "/v1/agent/token/agent", data=body, accept=(200,))


def write_tokens(folder: Path, tokens: Mapping[str, str]) -> None:
    """One file per role, mode 0600, in a folder of mode 0700; whole or not at all."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    for role, secret in tokens.items():
        path, part = folder / role, folder / f".{role}.part"
        part.unlink(missing_ok=True)
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as out:
            out.write(secret + "\n")
        part.replace(path)


def load_tokens(folder: Path) -> dict[str, str]:
    """role -> secret of what `write_tokens` wrote; empty when there is nothing."""
    with contextlib.suppress(FileNotFoundError):
        return {
            path.name: path.read_text().strip()
            for path in sorted(folder.iterdir())
            if not path.name.startswith(".")
        }
    return {}


def _file(name: str) -> str:
    return files("mesh.consul").joinpath(f"policies/{name}.hcl").read_text(encoding="utf-8")


def _policy_name(role: str) -> str:
    return f"weir-{role}"


async def _ensure_policy(consul: Consul, role: str, text: str) -> None:
    name = _policy_name(role)
    known = {row["Name"]: row["ID"] for row in (await consul.get("/v1/acl/policies")).body}
    body: dict[str, Any] = {"Name": name, "Rules": text, "Description": f"weir: role {role}"}
    path = "/v1/acl/policy"
    if name in known:
        path, body["ID"] = f"{path}/{known[name]}", known[name]
    await consul.exchange("PUT", path, data=json.dumps(body), accept=(200,))


async def _ensure_token(consul: Consul, role: str, secret: str) -> None:
    async with Consul(consul.address, secret, clock=consul.clock, rng=consul.rng) as itself:
        try:
            known = (await itself.get("/v1/acl/token/self")).body
        except Forbidden:
            known = None  # "ACL not found": this secret is new
    if known is not None:
        await _attach(consul, known["AccessorID"], role)
        return
    body = {
        "SecretID": secret,
        "Description": f"weir: {role}",
        "Policies": [{"Name": _policy_name(role)}],
        "Local": False,
    }
    await consul.exchange("PUT", "/v1/acl/token", data=json.dumps(body), accept=(200,))


async def _attach(consul: Consul, accessor: str, role: str) -> None:
    """Make sure that the token has the role's policy; other policies of it stay."""
    token = (await consul.get(f"/v1/acl/token/{accessor}")).body
    if token is None:
        raise ConsulError(404, f"ACL token of {role}", "not found", "was it deleted just now? try again")
    names = {policy["Name"] for policy in token.get("Policies") or ()}
    if _policy_name(role) not in names:
        token["Policies"] = [{"Name": name} for name in sorted(names | {_policy_name(role)})]
        await consul.exchange("PUT", f"/v1/acl/token/{accessor}", data=json.dumps(token), accept=(200,))
