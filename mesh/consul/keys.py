"""Every KV key, spelled once (../shared/DESIGN.md, "KV layout").

Law: pure.
"""

from __future__ import annotations

CONFIG = "config/traffic/"
"""Prefix of all traffic configuration. The key of exactly this name (empty value) is the marker:
while it is there, a missing key means its default; when it is gone too, the whole prefix was wiped
and that is a fault of the read, not an order."""

DEFAULT_CANARY = "config/traffic/canary-weight"
STATUS = "status/traffic/"
EPOCHS = "status/epochs/"
"""One record per config key: who won it last (mesh.traffic.epochs)."""
AUDIT = "audit/traffic/"
LOCKS = "locks/"
DRILL_LOCK = "locks/drill"
DRILLS = "drills/"

MAX_VALUE_BYTES = 512 * 1024


def canary_weight(service: str) -> str:
    return f"{CONFIG}{service}/canary-weight"


def region_shares(service: str) -> str:
    return f"{CONFIG}{service}/regions"


def evacuated(service: str) -> str:
    return f"{CONFIG}{service}/evacuated"


def status(service: str, region: str) -> str:
    return f"{STATUS}{service}/{region}"


def epoch(config_key: str) -> str:
    """Record that belongs to a key under CONFIG."""
    return EPOCHS + config_key.removeprefix(CONFIG)


def config_of_epoch(epoch_key: str) -> str:
    return CONFIG + epoch_key.removeprefix(EPOCHS)


def audit(stamp: str, identity: str) -> str:
    return f"{AUDIT}{stamp}-{identity}"
