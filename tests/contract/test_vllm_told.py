"""What an executor on vLLM tells its clients of it: lengths as vLLM has them, and vLLM's own load."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.batching import Scheduled
from tests.contract.engine_subjects import Orders, stand_in
from tests.contract.engine_suite import answer
from tests.contract.vllm_stand_in import ASK
from tests.fakes.vllm_wire import ORDERS
from tests.unit.executor import CHAT, CHAT_PATH, TEXT_PATH, Running, running

pytestmark = pytest.mark.real
CONTEXT = 1024


def test_lengths_are_vllm_s_affair_and_its_load_is_carried_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = Orders(tmp_path)
    monkeypatch.setenv(ORDERS, str(orders.file))

    async def main() -> None:
        engine = stand_in(tmp_path, max_num_seqs=1)
        async with running(Scheduled(engine)) as it:
            orders.give(step_ms=0)
            await lengths(it)
            orders.give(step_ms=500)  # minutes, until it is told to be quick
            asked = [asyncio.create_task(answer(engine, ASK(max_tokens=400))) for _ in range(2)]
            await it.until(lambda: engine.stats().waiting == 1)
            async with it.http.get(it.base + "/v1/models") as told:
                assert "named_metrics.num_requests_waiting=1," in told.headers["endpoint-load-metrics"]
            orders.give(step_ms=0)
            await asyncio.gather(*asked)

    asyncio.run(main())


async def lengths(it: Running) -> None:
    """The stand-in counts a byte as a token, four times what is guessed here at first."""

    async def asked(max_tokens: int, prompt: str = "hi") -> tuple[int, str | int]:
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
        status, said = await it.post(TEXT_PATH, body)
        return status, said["error"]["code"] if status != 200 else said["usage"]["completion_tokens"]

    assert (await it.post(CHAT_PATH, {"messages": CHAT["messages"]}))[0] == 200, "no length: what is left"
    assert await asked(CONTEXT - 500, "x" * 600) == (200, 424), "more than is left: what is left"
    assert await asked(8, "x" * 1000) == (200, 8)
    for too_long in ((CONTEXT + 1, "hi"), (8, "x" * (CONTEXT + 1))):
        assert await asked(*too_long) == (400, "context_length_exceeded")
