"""An executor whose torch engine is closed, as it is after `sleep?level=0` or when too many sleep on its
device: it says so at every door, refuses requests in the proper form, and comes back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mesh.clock import SystemClock
from services.admin import admin_app
from services.assembly import Stack, assemble
from services.listener import Listener
from services.pool.hotstart import HotPool
from services.pool.parts import Parts, PoolSettings
from services.pool.renewable import Renewable
from services.registration import Drain
from tests.llama_models import build
from tests.unit.executor import CHAT_PATH, TEXT_PATH, Running, running

pytestmark = pytest.mark.torch
ASK = {"model": "echo-1", "prompt": "hi", "max_tokens": 3, "temperature": 0}
OPTIONS = {"device": "cpu", "threads": "1", "kv_tokens": "512", "dtype": "float32"}


@pytest.mark.parametrize("fallback", ["", "layerwise"])
def test_cold_it_answers_everywhere_and_wakes(fallback: str, tmp_path: Path) -> None:
    stack = Stack("torch", str(build(tmp_path / "tiny")), OPTIONS, fallback)
    engine = Renewable(lambda _: assemble(stack, SystemClock(), Random(1)))

    async def check(it: Running, door: str) -> None:
        async def admin(method: str, path: str) -> tuple[int, Any]:
            async with it.http.request(method, door + path) as answer:
                return answer.status, await answer.json()

        async def models() -> Any:
            async with it.http.get(it.base + "/v1/models") as answer:
                return answer.status, (await answer.json())["data"][0]["max_model_len"]

        _, before = await it.post(TEXT_PATH, ASK)
        status, body = await admin("POST", "/sleep?level=0")
        assert (status, body["lifecycle"], body["memory"]["now"]) == (200, "cold", 0)
        status, body = await admin("GET", "/state")
        assert (status, body["lifecycle"], body["engine"]["name"]) == (200, "cold", "torch")
        assert await models() == (200, 256)
        assert "weir_executor_running 0.0" in await it.metrics()
        assert (await it.status("/health"), await it.status("/ready")) == (200, 503)
        for path, asked in ((TEXT_PATH, ASK), (CHAT_PATH, {"messages": [{"role": "user", "content": "x"}]})):
            status, body = await it.post(path, asked)
            assert (status, set(body["error"])) == (503, {"message", "type", "param", "code"})
        status, body = await admin("POST", "/wake")
        assert (status, body["lifecycle"], body["cold_starts"]) == (200, "running", 1)
        _, after = await it.post(TEXT_PATH, ASK)
        assert after["choices"] == before["choices"]

    async def main() -> None:
        async with running(engine) as it:
            quick = PoolSettings(drain=Drain(5.0, 0.0))
            pool = HotPool(Parts(it.instance, engine, SystemClock(), settings=quick))
            door = Listener(admin_app(lambda: None, pool), "127.0.0.1", 0)
            await door.start()
            try:
                await check(it, f"http://127.0.0.1:{door.port}")
            finally:
                await door.stop()

    asyncio.run(main())
