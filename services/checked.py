"""What `weir executor` was told, checked before anything starts: a model may take minutes to load.

Law: pure. Whether the words fit together is said here; whether an engine knows its options is the engine's.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from mesh.model import CANARY, STABLE
from regions.cli.errors import UsageError
from services.assembly import Stack
from services.instance import Identity

STAGES = (STABLE, CANARY)
OWN_MODELS = {"echo": "echo-1", "sim": "sim-1"}
"""What an engine without weights calls its model when nobody says."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}")
"""What may be part of a file name, of a header and of a Consul service id."""


def check(who: Identity, stack: Stack, listen: str, admin: str, classes: Iterable[str]) -> None:
    """classes: the tenant classes there are. Raises UsageError."""
    if who.stage not in STAGES:
        raise UsageError(f"--stage {who.stage!r}", "no stage", " or ".join(STAGES))
    for flag, text in (("--instance", who.instance), ("--region", who.region), ("--service", who.service)):
        if not _ID.fullmatch(text):
            raise UsageError(f"{flag} {text!r}", "no name", "letters, digits, '.', '_', '-'; 127 at most")
    known = sorted(classes)
    if who.tenant_class and who.tenant_class not in known:
        raise UsageError(
            f"--tenant-class {who.tenant_class!r}", "no such class", f"known: {', '.join(known)}"
        )
    address(listen, "--listen")
    if admin and not _loopback(address(admin, "--admin")[0]):
        raise UsageError(f"--admin {admin!r}", "not on loopback", "give 127.x.y.z:port")
    for flag, given in (("--fallback-option", stack.fallback_options), ("--fallback-rules", stack.rules)):
        if given and not stack.fallback:
            raise UsageError(flag, "means nothing without a second engine", "give --fallback")


def model_of(engine: str, model: str) -> str:
    """--model, or what the engine has of its own. Raises UsageError where it needs one."""
    found = model or OWN_MODELS.get(engine, "")
    if not found and engine in ("torch", "vllm"):
        raise UsageError("--model", f"is needed by engine {engine}", "a name of weir model list, or a folder")
    if not found and engine == "openai":
        raise UsageError("--model", "is needed by engine openai", "the name the server has for it")
    return found


def address(text: str, what: str) -> tuple[str, int]:
    """(host, port) of `host:port`. Raises UsageError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"{what} {text!r}", "not host:port", "for example 127.0.0.1:9000")
    return host, int(port)


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
