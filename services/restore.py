"""`weir executor --from-snapshot FILE`: a new process becomes the instance that a snapshot is of.

Law: identity, engine, model and options come from the file alone; an option that says otherwise is refused.
Nothing is ready before its files, its engine and its answer were held against the file.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from regions.cli.errors import UsageError, WeirError
from services.options import Told
from services.pool.coldstart import BROKEN
from services.pool.hotstart import HotPool
from services.pool.memory import read, weir_version
from services.pool.rebuild import same_answer, same_engine, same_files
from services.pool.snapshot import Snapshot, SnapshotRefused, decode
from services.recipe import is_secret

_IDENTITY = ("service", "instance", "region", "zone", "stage", "version", "tenant_class")


@dataclass(frozen=True, slots=True)
class Restored:
    """A snapshot with the bytes of its file, and the file's name for messages."""

    snapshot: Snapshot
    raw: bytes
    name: str


def restored(path: Path) -> Restored:
    """Raises SnapshotRefused: no snapshot, damaged, or another weir's."""
    raw, ours = read(path), weir_version()
    found = decode(raw, str(path))
    if found.weir != ours:
        raise SnapshotRefused(str(path), f"written by weir {found.weir or 'unknown'}, this is {ours}")
    return Restored(found, raw, str(path))


def as_told(it: Restored, told: Told, given: Collection[str]) -> Told:
    """What was said, with what the file says. given: names of the options that were on the command line.

    Raises UsageError for one that says otherwise. Secrets are not in the file: they may be given.
    """
    recipe = it.snapshot.recipe
    says: dict[str, Any] = {name: it.snapshot.identity[name] for name in _IDENTITY}
    says |= {"served_model_name": it.snapshot.identity["model"], "model": recipe.model}
    says |= {"engine": recipe.engine, "fallback": recipe.fallback, "fallback_rules": recipe.rules}
    for name, value in says.items():
        if name in given and getattr(told, name) != value:
            raise _otherwise(it, name, str(getattr(told, name)), repr(value))
    price = recipe.options.get("token_cost_ms", "0")
    if "token_cost_ms" in given and f"{told.token_cost_ms:g}" != price:
        raise _otherwise(it, "token_cost_ms", f"{told.token_cost_ms:g}", price)
    says["option"] = _options(it, "option", told.option, recipe.options)
    says["fallback_option"] = _options(it, "fallback_option", told.fallback_option, recipe.fallback_options)
    return replace(told, **says)


def _options(it: Restored, name: str, given: Sequence[str] | None, recipe: Any) -> list[str]:
    fixed = [f"{key}={value}" for key, value in recipe.items()]
    more = [text for text in given or () if text not in fixed]
    for text in more:
        key, _, value = text.partition("=")
        if not is_secret(key, value):
            raise _otherwise(it, name, text, ", ".join(fixed) or "none")
    return [*fixed, *more]


def _otherwise(it: Restored, name: str, given: str, there: str) -> UsageError:
    flag = f"--{name.replace('_', '-')} {given!r}"
    return UsageError(flag, f"snapshot {it.name} says {there}", "leave it out, or start without a snapshot")


async def before_start(it: Restored, folder: Path | None) -> None:
    """Before a model is loaded for minutes. Raises SnapshotRefused."""
    if not it.snapshot.model.files:
        return
    if folder is None:
        raise SnapshotRefused(it.name, f"model {it.snapshot.recipe.model!r} is not here", _way_out(it))
    try:
        await same_files(it.snapshot, folder)
    except WeirError as error:
        raise SnapshotRefused(it.name, f"{error.what}: {error.why}") from error
    except RuntimeError as error:
        raise SnapshotRefused(it.name, f"another version of the model: {error}") from error


def _way_out(it: Restored) -> str:
    return f"weir model prepare {it.snapshot.recipe.model}"


async def before_ready(it: Restored, pool: HotPool) -> None:
    """The engine has started and takes no traffic yet. Raises SnapshotRefused."""
    try:
        same_engine(it.snapshot, pool.parts)
        await same_answer(it.snapshot.answer, pool.parts.engine, pool.parts.settings.ask_limit_s)
    except BROKEN as error:
        raise SnapshotRefused(it.name, str(error) or type(error).__name__) from error
    pool.memory.restore(it.snapshot, it.raw)
