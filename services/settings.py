"""What one executor runs with, and the registration that follows from it.

Law: values; nothing is started here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mesh.consul import register
from regions.cli.errors import UsageError
from services.answer_settings import AnswerSettings
from services.assembly import Stack
from services.checked import address
from services.devices.host import host_id
from services.instance import Identity
from services.pool.parts import PoolSettings
from services.registration import Drain
from services.restore import Restored
from services.tenants import Tenants

_WILDCARDS = ("0.0.0.0", "::", "[::]")  # noqa: S104 (refused, not bound)


@dataclass(frozen=True, slots=True)
class Settings:
    """What `weir executor` is started with. Addresses are host:port; consul "" means: don't register.

    device: uuid, "cpu", or "" for what is best. devices: "fake:SEED[:COUNT]", or "" for those there are.
    run_dir: folder for the snapshot of a sleeping instance. device_memory: bytes of it to claim, 0 for none.
    tenants: None for those that ship. restored: the snapshot that it is to become, which all else here is in
    accord with already. pool: but for its drain.
    """

    identity: Identity
    listen: str
    sidecar: str
    consul: str
    token_sha256: str
    stack: Stack
    admin: str = ""
    drain: Drain = field(default_factory=Drain)
    debug: bool = False
    device: str = ""
    devices: str = ""
    run_dir: str = ""
    device_memory: int = 0
    tenants: Tenants | None = None
    restored: Restored | None = None
    pool: PoolSettings = field(default_factory=PoolSettings)
    answers: AnswerSettings = field(default_factory=AnswerSettings)


def row(settings: Settings) -> register.Instance:
    """The registration that these settings ask for. Raises UsageError."""
    who = settings.identity
    host, port = address(settings.listen, "--listen")
    if host in _WILDCARDS:
        raise UsageError(f"--listen {settings.listen!r}", "no address others can call", "give the host's own")
    sidecar_host, sidecar_port = address(settings.sidecar, "--sidecar")
    return register.Instance(
        service=who.service,
        id=who.instance,
        region=who.region,
        zone=who.zone,
        stage=who.stage,
        version=who.version,
        model=who.model,
        tenant_class=who.tenant_class,
        address=host,
        port=port,
        xds_token_sha256=settings.token_sha256,
        sidecar_address=sidecar_host,
        sidecar_port=sidecar_port,
        admin=settings.admin,
        host=host_id(),
    )
