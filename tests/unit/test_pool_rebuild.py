"""A rebuild is made from the snapshot and held against it: on a move, after a crash, in another process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from mesh.clock import SystemClock
from regions.cli.errors import UsageError
from services import restore
from services.engines import make_engine
from services.faults import WakeFailed
from services.instance import Identity, Instance
from services.lifecycle import Lifecycle, State
from services.options import Told
from services.pool.hotstart import HotPool
from services.pool.memory import weir_version
from services.pool.parts import Parts, PoolSettings
from services.pool.renewable import Renewable
from services.pool.snapshot import ModelFile, ModelParts, SnapshotRefused, decode, encode
from services.registration import Drain
from services.told import settings_of
from tests.fakes.sleepy_engine import Orders
from tests.unit.pool_world import RECIPE, World, cards, lived, raises


def test_a_move_is_built_from_what_the_snapshot_says() -> None:
    async def test(it: World) -> None:
        assert it.devices is not None
        own, other = (d.uuid for d in it.devices.list())
        await it.pool.sleep()
        # What this process would build by itself no longer counts.
        raw = it.pool.memory.raw
        found = decode(raw)
        moved = replace(found.recipe, options={"dtype": "fp16"})
        it.pool.memory.raw = encode(replace(found, recipe=moved))
        it.devices.set_load(own, 0.9)
        woken = await it.pool.wake()
        assert (woken.ok, it.engine.binding.uuid, it.recipes) == (True, other, [moved])
        assert "from the snapshot" in next(s.note for s in woken.steps if s.name == "rebuild")

    lived(test, devices=cards(), from_snapshot=True)


def test_a_cold_start_after_a_sleep_too_and_one_that_never_slept_has_none() -> None:
    async def test(it: World) -> None:
        it.instance.failed("died")
        assert (await it.pool.wake()).ok
        assert (it.recipes, it.built) == ([], 2)
        await it.pool.sleep()
        await it.pool.cool()
        assert (await it.pool.wake()).ok
        assert it.recipes == [RECIPE.public()]

    lived(test, from_snapshot=True)


def test_another_engine_than_the_snapshots_takes_no_traffic() -> None:
    async def test(it: World) -> None:
        await it.pool.sleep()
        it.orders.on_wake = raises(WakeFailed("no memory"))
        found = decode(it.pool.memory.raw)
        facts = {**found.facts, "context": 7}
        it.pool.memory.raw = encode(replace(found, facts=facts))
        woken = await it.pool.wake()
        assert (woken.code, it.state) == ("quarantined", State.QUARANTINED)
        assert "engine's context is 7 there" in woken.error

    lived(test, from_snapshot=True)


WHO = Identity("embed", "e-1", "eu-west-3", "b", "canary", "9", "sim-1")
OPTIONS = {"speed": "200", "context": "512"}


def pool_of(who: Identity, model: str, options: Mapping[str, str], folder: Path | None = None) -> HotPool:
    engine = Renewable(lambda _: make_engine("sim", options, model))
    recipe = replace(RECIPE, engine="sim", model=model, options=options)
    quick = PoolSettings(drain=Drain(1.0, 0.0))
    instance = Instance(who, engine, Lifecycle())
    return HotPool(Parts(instance, engine, SystemClock(), recipe=recipe, model_folder=folder, settings=quick))


@pytest.fixture(scope="module")
def raw() -> bytes:
    """The snapshot of an instance that slept."""

    async def main() -> bytes:
        pool = pool_of(WHO, "sim-1", OPTIONS)
        await pool.parts.engine.start()
        pool.parts.instance.lifecycle.to(State.RUNNING)
        assert (await pool.sleep()).ok
        await pool.parts.engine.close()
        return pool.memory.raw

    return asyncio.run(main())


@pytest.fixture
def file(tmp_path: Path, raw: bytes) -> Path:
    path = tmp_path / "e-1.snapshot"
    path.write_bytes(raw)
    return path


def test_a_new_process_is_who_the_snapshot_says(file: Path) -> None:
    told = Told(
        listen="127.0.0.1:9000", region="eu-west-3", engine="sim", option=["speed=200"],
        from_snapshot=str(file), given=frozenset({"listen", "region", "engine", "option", "from_snapshot"}),
    )  # fmt: skip
    found = settings_of(told)
    assert found.identity == WHO
    assert (found.stack.engine, found.stack.model, found.stack.options) == ("sim", "sim-1", OPTIONS)
    assert found.restored is not None


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"stage": "stable"}, "--stage 'stable'"),
        ({"engine": "echo"}, "--engine 'echo'"),
        ({"version": "10"}, "--version '10'"),
        ({"option": ["speed=3"]}, "--option 'speed=3'"),
        ({"fallback": "echo"}, "--fallback 'echo'"),
    ],
)
def test_who_says_otherwise_is_refused_by_the_option(file: Path, said: dict[str, str], named: str) -> None:
    told = Told(listen="127.0.0.1:9000", from_snapshot=str(file), given=frozenset(said), **said)  # type: ignore[arg-type]
    with pytest.raises(UsageError) as caught:
        settings_of(told)
    assert str(caught.value).startswith(named)


def changed_file(file: Path, **fields: object) -> restore.Restored:
    found = replace(decode(file.read_bytes()), **fields)  # type: ignore[arg-type]
    file.write_bytes(encode(found))
    return restore.restored(file)


def test_another_weirs_snapshot_and_a_damaged_one_are_refused(file: Path) -> None:
    with pytest.raises(SnapshotRefused, match=f"written by weir 0.0.1, this is {weir_version()}"):
        changed_file(file, weir="0.0.1")
    file.write_bytes(file.read_bytes()[:-3] + b"000")
    with pytest.raises(SnapshotRefused, match="corrupt"):
        restore.restored(file)
    with pytest.raises(SnapshotRefused, match="No such file"):
        restore.restored(file.with_name("nothing"))


def test_another_version_of_the_models_files_is_refused_before_anything_is_loaded(
    file: Path, tmp_path: Path
) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    it = changed_file(file, model=ModelParts(files=(ModelFile("config.json", 2, "sha256:00"),)))
    with pytest.raises(SnapshotRefused, match=r"another version of the model: config\.json"):
        asyncio.run(restore.before_start(it, tmp_path / "m"))
    with pytest.raises(SnapshotRefused, match="'sim-1' is not here") as caught:
        asyncio.run(restore.before_start(it, None))
    assert "weir model prepare" in caught.value.way_out


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (OPTIONS, ""),
        ({**OPTIONS, "context": "64"}, "context is 512 there and 64"),
        (None, "the fixed prompt got"),
    ],
)
def test_nothing_is_ready_before_engine_and_answer_are_as_the_snapshot_says(
    file: Path, options: dict[str, str] | None, why: str
) -> None:
    async def main() -> HotPool:
        it = restore.restored(file)
        if options is None:
            answer = replace(it.snapshot.answer, ids=(1, 2))
            it = replace(it, snapshot=replace(it.snapshot, answer=answer))
        pool = pool_of(WHO, "sim-1", OPTIONS if options is None else options)
        await pool.parts.engine.start()
        try:
            await restore.before_ready(it, pool)
        finally:
            await pool.parts.engine.close()
        return pool

    if why:
        with pytest.raises(SnapshotRefused, match=why):
            asyncio.run(main())
        return
    memory = asyncio.run(main()).memory
    assert (memory.raw, memory.answer) == (file.read_bytes(), decode(file.read_bytes()).answer)


def test_its_answer_is_what_later_wakes_are_held_against(file: Path) -> None:
    async def test(it: World) -> None:
        found = restore.restored(file)
        it.pool.memory.restore(found.snapshot, found.raw)
        await it.pool.sleep()
        assert not (await it.pool.wake()).ok, "another engine answers otherwise"

    lived(test, Orders())
