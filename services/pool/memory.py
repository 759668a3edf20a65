"""What an instance remembers while it sleeps: the answer it gave, the memory it held, its snapshot.

Law: one instance's memory; files only through mesh.world.files, whole or not there. The model's folder is
described once; the engine answers the fixed prompt once, the first time it is asked to sleep.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from mesh.world import files
from services.engine import FIXED_PROMPT, EngineFacts
from services.pool.describe import model_parts
from services.pool.parts import Parts
from services.pool.snapshot import MAX_BYTES, ModelParts, Snapshot, SnapshotRefused, decode, encode, foreign
from services.pool.verify import Answer, ask, garbage

log = logging.getLogger("weir.pool")


class Memory:
    """answer: to the fixed prompt, None before it was asked. held, asleep: device memory in bytes, awake and
    asleep. raw: the snapshot as it is in the file, b"" before the first sleep."""

    def __init__(self, parts: Parts) -> None:
        self._p = parts
        self._model: ModelParts | None = None
        self.answer: Answer | None = None
        self.held = self.asleep = 0
        self.raw = b""

    async def learn(self) -> list[str]:
        """Take the answer that counts from now on; notes for people. Raises what the engine raises."""
        if self.answer is not None:
            return []
        self.answer = await ask(self._p.engine, self._p.settings.ask_limit_s)
        return await self._compared(self.answer)

    async def _compared(self, answer: Answer) -> list[str]:
        """With what the last run of this instance left. It only warns: another device may round otherwise."""
        file = self._p.snapshot_file
        if file is None or not file.exists():
            return []
        try:
            before = await asyncio.to_thread(load, file)
        except SnapshotRefused as error:
            log.warning("%s: %s", error.what, error.why)
            return [f"the last run's snapshot is not used: {error.why}"]
        facts = jsonable(self._p.engine.facts())
        why = foreign(before, asdict(self._p.instance.identity), facts) or garbage(before.answer, answer)
        if why:
            log.warning("snapshot %s of the last run: %s", file, why)
        return [f"the last run's snapshot differs: {why}"] if why else ["as in the last run"]

    def restore(self, snapshot: Snapshot, raw: bytes) -> None:
        """This process was started from it: whatever is built here must answer as it says."""
        self.answer, self.raw = snapshot.answer, raw

    def snapshot(self) -> Snapshot | None:
        """What there is to rebuild from, None before the first sleep."""
        return decode(self.raw, self._p.instance.identity.instance) if self.raw else None

    async def describe(self) -> None:
        """Read the model's folder, once. Raises WeirError."""
        if self._model is None:
            folder = self._p.model_folder
            self._model = ModelParts() if folder is None else await asyncio.to_thread(model_parts, folder)

    @property
    def need(self) -> int:
        """Bytes of device memory that waking takes; 0: not known."""
        return max(0, self.held - self.asleep)

    async def write(self, level: int) -> int:
        """Make the snapshot and put it into its file. Returns its size. Raises WeirError."""
        assert self.answer is not None
        snapshot = Snapshot(
            identity=asdict(self._p.instance.identity),
            facts=jsonable(self._p.engine.facts()),
            recipe=self._p.recipe.public(),
            device=self._p.engine.binding.uuid,
            level=level,
            prompt=FIXED_PROMPT,
            answer=self.answer,
            held=self.held,
            asleep=self.asleep,
            taken_at=int(self._p.clock.time()),
            model=self._model or ModelParts(),
            weir=weir_version(),
        )
        self.raw = encode(snapshot)
        if self._p.snapshot_file is not None:
            await asyncio.to_thread(files.write, self._p.snapshot_file, self.raw, mode=0o600)
        return len(self.raw)


def weir_version() -> str:
    """Of this weir."""
    return metadata.version("weir")


def jsonable(facts: EngineFacts) -> dict[str, Any]:
    """Facts of an engine as JSON has them."""
    return {n: list(v) if isinstance(v, tuple) else v for n, v in asdict(facts).items()}


def load(path: Path) -> Snapshot:
    """The snapshot in a file. Raises SnapshotRefused, also when there is none."""
    return decode(read(path), str(path))


def read(path: Path) -> bytes:
    """A snapshot's file, unseen. Raises SnapshotRefused when there is none."""
    try:
        with path.open("rb") as file:
            # One byte more than there may be: a file that is larger shows as cut off.
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise SnapshotRefused(str(path), error.strerror or "can't be read") from error
