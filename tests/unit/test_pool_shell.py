"""The pool's shell: cycles that leak nothing, who goes cold, the admin door, what a model folder tells."""

from __future__ import annotations

import asyncio
import gc
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from mesh.clock import SystemClock
from mesh.consul.errors import ConsulError, Unreachable
from regions.cli.errors import WeirError
from services.admin import admin_app
from services.devices.fake import FakeDevices
from services.engine import Engine, GenerateRequest
from services.engines import make_engine
from services.instance import Identity, Instance
from services.lifecycle import Lifecycle, State
from services.listener import Listener
from services.pool import describe
from services.pool.describe import digest, model_parts
from services.pool.hand import Said, settled
from services.pool.hotstart import HotPool
from services.pool.keeper import Keeper
from services.pool.lru import MOST_ASLEEP
from services.pool.parts import Parts, PoolSettings
from services.pool.renewable import Renewable
from services.pool.snapshot import decode, encode
from services.registration import Drain
from tests.fakes.sleepy_engine import Orders, SleepyEngine
from tests.held import Held, held_of, least_growth

WHO = Identity("chat", "chat-stable-0", "us-east-1", "z1", "stable", "7", "m")
CYCLES = 100
MEASURED = (10, 40, 70)
QUICK = PoolSettings(drain=Drain(2.0, 0.0))


def pool_of(engine: Renewable, devices: FakeDevices | None = None, file: Path | None = None) -> HotPool:
    instance = Instance(WHO, engine, Lifecycle())
    return HotPool(
        Parts(instance, engine, SystemClock(), devices=devices, snapshot_file=file, settings=QUICK)
    )


async def started(engine: Renewable, file: Path | None = None) -> HotPool:
    pool = pool_of(engine, file=file)
    await engine.start()
    pool.parts.instance.lifecycle.to(State.RUNNING)
    return pool


async def tokens(engine: Engine) -> list[int]:
    return [t.token_id async for t in engine.generate(GenerateRequest("r", "how deep", 6, seed=3))]


def held(folder: Path) -> tuple[int, Held, int]:
    """(resident bytes, files, tasks) of this process now."""
    gc.collect()
    return psutil.Process().memory_info().rss, held_of(folder), len(asyncio.all_tasks())


CHEAP = {"sim": {"speed": "200", "weights_bytes": "1000", "kv_bytes_per_token": "1"}, "echo": {}}


@pytest.mark.parametrize("name", CHEAP)
def test_a_hundred_cycles_leak_nothing_and_change_no_token(name: str, tmp_path: Path) -> None:
    async def main() -> None:
        engine = Renewable(lambda _: make_engine(name, CHEAP[name], "m"))
        pool = await started(engine, tmp_path / "s.snapshot")
        before, memory = await tokens(engine), []
        for cycle in range(CYCLES):
            if cycle in MEASURED:
                size, files, tasks = held(tmp_path)
                memory.append(size)
            slept = await pool.sleep()
            assert slept.ok, slept
            woken = await pool.wake()
            assert woken.ok, woken
            assert woken.recovered == "", "each wake went the straight way"
            assert await tokens(engine) == before
            stats = engine.stats()
            assert (stats.running, stats.waiting, stats.kv_used) == (0, 0, 0.0)
        after, files_after, tasks_after = held(tmp_path)
        assert files_after == files
        assert tasks_after == tasks
        assert least_growth([*memory, after]) < 2 * 2**20, "what 30 cycles leave behind"
        assert [p.name for p in tmp_path.iterdir()] == ["s.snapshot"]
        await engine.close()

    asyncio.run(main())


def test_thirty_cold_starts_leave_one_engine() -> None:
    async def main() -> None:
        orders = Orders(token_cost_ms=0)
        built = [0]

        def build(where: Any) -> SleepyEngine:
            built[0] += 1
            return SleepyEngine(orders, where, built[0] - 1)

        pool = await started(Renewable(build))
        for _ in range(30):
            for verb in (pool.sleep, pool.cool, pool.wake):
                assert (await verb()).ok
        assert (orders.living, built[0]) == (1, 31)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


class FakeAgent:
    def __init__(self, rows: Mapping[str, Any]) -> None:
        self.rows, self.error = dict(rows), None

    error: ConsulError | None

    async def services(self) -> Mapping[str, Mapping[str, Any]]:
        if self.error is not None:
            raise self.error
        return self.rows


def sleeper(slept_at: int, device: str = "cpu") -> dict[str, Any]:
    return {"Service": "chat", "Meta": {"lifecycle": "asleep", "device": device, "slept_at": str(slept_at)}}


def test_beyond_eight_the_one_that_slept_longest_goes_cold_by_itself() -> None:
    async def main() -> None:
        orders = Orders(token_cost_ms=0)
        pool = await started(Renewable(lambda where: SleepyEngine(orders, where, 0)))
        agent = FakeAgent({f"i{n}": sleeper(200 + n) for n in range(MOST_ASLEEP)})
        keeper = Keeper(pool, agent)
        assert not await keeper.tick(), "it doesn't sleep"
        await pool.sleep()
        agent.rows[WHO.instance] = sleeper(500)
        assert not await keeper.tick(), "another one slept longer"
        agent.rows[WHO.instance] = sleeper(100, device="GPU-1")
        assert not await keeper.tick(), "others sleep on another device"
        agent.rows[WHO.instance] = sleeper(100)
        agent.error = Unreachable(0, "agent", "refused")
        assert not await keeper.tick(), "nobody knows"
        agent.error = None
        assert await keeper.tick()
        assert (pool.parts.instance.lifecycle.state, orders.living) == (State.COLD, 0)
        assert not await keeper.tick()
        assert (await pool.wake()).ok

    asyncio.run(main())


class Door:
    """The admin door over a real socket."""

    def __init__(self, http: aiohttp.ClientSession, base: str) -> None:
        self._http, self._base = http, base

    async def __call__(self, method: str, path: str) -> tuple[int, Any]:
        async with self._http.request(method, self._base + path) as answer:
            raw = await answer.read()
            return answer.status, raw if "octet" in answer.content_type else json.loads(raw)


async def at_the_door(pool: HotPool, test: Any) -> None:
    drained: list[bool] = []
    listener = Listener(admin_app(lambda: drained.append(True), pool), "127.0.0.1", 0)
    await listener.start()
    try:
        async with aiohttp.ClientSession() as http:
            await test(Door(http, f"http://127.0.0.1:{listener.port}"), drained)
    finally:
        await listener.stop()


def test_the_admin_door_says_what_happened_and_never_200_for_a_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    orders = Orders(token_cost_ms=0)

    async def test(ask: Door, drained: list[bool]) -> None:
        assert (await ask("GET", "/snapshot"))[0] == 404
        code, body = await ask("POST", "/sleep?level=1")
        assert (code, body["lifecycle"], body["outcome"]["ok"]) == (200, "asleep", True)
        assert body["memory"] == {"now": 0, "held": 1000, "asleep": 0}
        assert body["device"]["memory_total"] > 0
        assert [s["name"] for s in body["outcome"]["steps"]][-1] == "tell Consul"
        code, body = await ask("POST", "/sleep")
        assert (code, body["outcome"]["code"]) == (409, "wrong_state")
        assert settled(Said(code, body), "asleep").ok
        assert not settled(Said(code, body), "running").ok
        code, raw = await ask("GET", "/snapshot")
        assert decode(raw).identity["instance"] == WHO.instance
        orders.garbage = orders.cold_garbage = 1
        code, body = await ask("POST", "/wake")
        assert (code, body["lifecycle"]) == (500, "quarantined")
        assert "fixed prompt" in body["error"]
        orders.garbage = orders.cold_garbage = 0
        assert (await ask("POST", "/wake"))[0] == 200
        assert settled(Said(*await ask("POST", "/wake")), "running").ok
        orders.keeps = 1000
        code, body = await ask("POST", "/sleep")
        assert (code, body["outcome"]["code"], body["lifecycle"]) == (500, "sleep_failed", "cold")
        assert (await ask("GET", "/state"))[1]["last"]["code"] == "sleep_failed"
        assert not settled(Said(code, body), "cold").ok
        assert (await ask("POST", "/wake?device=GPU-x"))[0] == 400
        assert (await ask("POST", "/sleep?level=9"))[0] == 400
        assert (await ask("POST", "/sleep?level=two"))[0] == 400
        code, body = await ask("POST", "/drain")
        assert (code, body["draining"], drained) == (200, True, [True])

    async def main() -> None:
        devices = FakeDevices()
        home = devices.bind(devices.list()[0].uuid)
        built = [0]

        def build(where: Any) -> SleepyEngine:
            built[0] += 1
            return SleepyEngine(orders, where, built[0] - 1)

        pool = pool_of(Renewable(build, home), devices)
        await pool.parts.engine.start()
        pool.parts.instance.lifecycle.to(State.RUNNING)
        await at_the_door(pool, test)

    asyncio.run(main())
    lines = [row.getMessage() for row in caplog.records if row.name == "weir.pool"]
    assert lines[0].startswith("sleep: asleep after ")
    assert any(line.startswith("sleep: sleep_failed: ") for line in lines), lines


def test_a_lost_device_is_told_by_the_state() -> None:
    async def main() -> None:
        devices = FakeDevices()
        home = devices.bind(devices.list()[0].uuid)
        orders = Orders()
        pool = pool_of(Renewable(lambda where: SleepyEngine(orders, where, 0), home), devices)
        devices.lose(home.uuid)

        async def test(ask: Door, _: list[bool]) -> None:
            assert (await ask("GET", "/state"))[1]["device"]["lost"]

        await at_the_door(pool, test)

    asyncio.run(main())


CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def folder(path: Path, tensors: int = 3) -> Path:
    """A model's folder with one safetensors file, made by hand: its form is plain."""
    header = {
        f"t{n}": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [8 * n, 8 * n + 8]}
        for n in range(tensors)
    }
    raw = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    path.mkdir()
    (path / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(8 * tensors))
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": 2, "x": 1}')
    (path / "tokenizer.json").write_text("{}")
    return path


def test_a_models_folder_is_described_without_reading_weights_into_memory(tmp_path: Path) -> None:
    parts = model_parts(folder(tmp_path / "m"))
    assert [f.name for f in parts.files] == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"
    ]  # fmt: skip
    assert parts.tensors[1] == ("t1", "BF16", [2, 2], "model.safetensors", 8, 16)
    assert (parts.kv["layers"], parts.kv["kv_heads"], parts.kv["head_dim"]) == (2, 2, 16)
    assert parts.sampling == {"temperature": 0.6, "eos_token_id": 2}
    assert parts.config == CONFIG


def test_changed_files_have_another_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder(tmp_path / "m") / "model.safetensors"
    for limit in (2**30, 0):
        monkeypatch.setattr(describe, "WHOLE_BYTES", limit)
        before = digest(path)
        assert before.startswith("sha256:" if limit else "sample:")
        assert digest(path) == before
        path.write_bytes(path.read_bytes() + b"x")
        assert digest(path) != before


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("config.json", "{", "can't be read"),
        ("config.json", "[]", "not a JSON object"),
        ("model.safetensors", "\x00" * 20, "impossible size"),
        ("model.safetensors", "\x02" + "\x00" * 7 + "[]", "makes no sense"),
    ],
)
def test_a_folder_that_can_not_be_read_is_named(tmp_path: Path, file: str, content: str, why: str) -> None:
    path = folder(tmp_path / "m")
    (path / file).write_text(content)
    with pytest.raises(WeirError, match=why) as raised:
        model_parts(path)
    assert file in str(raised.value)


def test_a_model_without_a_readable_folder_sleeps_all_the_same(tmp_path: Path) -> None:
    async def main() -> None:
        engine = Renewable(lambda _: make_engine("echo", {}, "m"))
        instance = Instance(WHO, engine)
        pool = HotPool(
            Parts(instance, engine, SystemClock(), model_folder=tmp_path / "nothing", settings=QUICK)
        )
        await engine.start()
        slept = await pool.sleep()
        assert slept.ok
        assert "not described" in slept.steps[3].note

    asyncio.run(main())


def test_an_engine_is_known_by_its_snapshot(tmp_path: Path) -> None:
    async def main() -> None:
        engine = Renewable(lambda _: make_engine("echo", {}, "m"))
        instance = Instance(WHO, engine)
        parts = Parts(
            instance, engine, SystemClock(), model_folder=folder(tmp_path / "m"), settings=QUICK,
            snapshot_file=tmp_path / "s.snapshot",
        )  # fmt: skip
        pool = HotPool(parts)
        await engine.start()
        assert (await pool.sleep()).ok
        found = decode((tmp_path / "s.snapshot").read_bytes())
        assert found.model.config == CONFIG
        assert encode(found) == pool.memory.raw
        assert os.fspath(tmp_path / "m") == found.model.folder

    asyncio.run(main())
