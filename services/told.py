"""What `weir executor` was told, made into what it runs with.

Law: puts words together and refuses what makes no sense; starts nothing. Every refusal names its option.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from regions.cli.errors import UsageError
from services import checked
from services.answer_settings import AnswerSettings
from services.assembly import Stack
from services.batching.model import BatchingSettings
from services.devices.fake import pretended
from services.instance import Identity
from services.kv.sizes import parse_size
from services.options import Told
from services.pool.parts import PoolSettings
from services.registration import Drain
from services.restore import as_told, restored
from services.settings import Settings
from services.tenants import Tenants
from services.tenants_file import FILE, load
from services.tuning import tuned


def settings_of(told: Told) -> Settings:
    """Raises UsageError, SnapshotRefused."""
    again = restored(Path(told.from_snapshot)) if told.from_snapshot else None
    if again is not None:
        told = as_told(again, told, told.given)
    table = load(Path(told.tenants) if told.tenants else FILE)
    stack = stack_of(told, table)
    if told.consul and not told.sidecar:
        raise UsageError(
            "--consul", "needs --sidecar", "the address others are to call, such as 127.0.0.1:9000"
        )
    if told.devices:
        pretended(told.devices)
    who = identity_of(told, stack.model)
    checked.check(who, stack, told.listen, told.admin, table.priorities)
    return Settings(
        identity=who,
        listen=told.listen,
        sidecar=told.sidecar,
        consul=told.consul,
        token_sha256=told.xds_token_sha256,
        stack=stack,
        admin=told.admin,
        drain=Drain(told.drain_deadline_s, told.drain_settle_s),
        debug=told.debug,
        device=told.device,
        devices=told.devices,
        run_dir=told.run_dir,
        device_memory=_bytes(told.device_memory),
        tenants=table,
        restored=again,
        pool=tuned("pool", PoolSettings(), told.tune or ()),
        answers=tuned("answers", AnswerSettings(), told.tune or ()),
    )


def identity_of(told: Told, model: str) -> Identity:
    served = told.served_model_name or model.rstrip("/").rpartition("/")[2]
    return Identity(
        service=told.service,
        instance=told.instance,
        region=told.region,
        zone=told.zone,
        stage=told.stage,
        version=told.version,
        model=served,
        tenant_class=told.tenant_class,
    )


def stack_of(told: Told, table: Tenants) -> Stack:
    options = {"token_cost_ms": f"{told.token_cost_ms:g}"} if told.engine == "echo" else {}
    return Stack(
        engine=told.engine,
        model=checked.model_of(told.engine, told.model),
        options=options | pairs("--option", told.option),
        fallback=told.fallback,
        fallback_options=pairs("--fallback-option", told.fallback_option),
        rules=told.fallback_rules,
        batching=tuned("scheduler", _batching(told, table), told.tune or ()),
    )


def _batching(told: Told, table: Tenants) -> BatchingSettings:
    return BatchingSettings(
        batch_size=told.batch_size,
        max_delay_ms=told.max_delay_ms,
        concurrency=told.concurrency,
        queue_limit=told.queue_limit,
        classes=tuple(sorted(table.priorities, key=table.priorities.__getitem__)),
    )


def pairs(flag: str, texts: Sequence[str] | None) -> dict[str, str]:
    """NAME=VALUE texts as a mapping; the last one of a name wins. Raises UsageError."""
    found = {}
    for text in texts or ():
        name, sign, value = text.partition("=")
        if not sign:
            raise UsageError(f"{flag} {text!r}", "not NAME=VALUE", f"for example {flag} seed=7")
        found[name] = value
    return found


def _bytes(text: str) -> int:
    try:
        return parse_size(text) if text else 0
    except ValueError as error:
        raise UsageError(f"--device-memory {text!r}", str(error), "for example 6GiB") from None
