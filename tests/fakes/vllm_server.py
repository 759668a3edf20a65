"""A stand-in for vLLM's server: its API, its metrics, its sleep verbs, and faults on order.

Law: behaves as vLLM 0.32 was seen to (shapes of chunks, errors and metrics are copied from its answers), so
that what passes here passes there; what real vLLM can't be made to do on a CPU (sleep, run out of memory,
lie) it does here. Orders are a JSON file, read anew for every request: {"step_ms": 5, "sleep": "lie", …}, see
`Orders`. Started as `python -m vllm.entrypoints.openai.api_server` from the folder that `fake_python` makes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
from typing import Any

from aiohttp import web

from tests.fakes import vllm_model as lm
from tests.fakes.vllm_wire import Chunks, error, json_answer, orders, prompt_ids, sure

MIB = 2**20
KV_TOKENS, BLOCK = 4096, 16


class Server:
    """One server with one model."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.model, self.context, self.dev = args.served_model_name, args.max_model_len or 4096, args.dev
        self.can_sleep = args.enable_sleep_mode
        self.slots = asyncio.Semaphore(args.max_num_seqs or 256)
        self.running = self.waiting = self.kv = self.made = self.prompts = 0
        self.asleep: set[str] = set()
        self.weights = bytearray(b"w" * (orders().weights_mb * MIB))
        self.loaded, self.stale, self.garbage = True, False, 0
        self.awake = asyncio.Event()
        self.awake.set()
        self.numbers = itertools.count()

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.post("/v1/completions", lambda r: self.complete(r, chat=False)),
                web.post("/v1/chat/completions", lambda r: self.complete(r, chat=True)),
                web.get("/v1/models", self.models),
                web.get("/health", lambda _: json_answer({})),
                web.get("/metrics", self.metrics),
            ]
        )
        if self.dev:
            app.add_routes(
                [
                    web.post("/sleep", self.sleep),
                    web.post("/wake_up", self.wake),
                    web.get("/is_sleeping", lambda _: json_answer({"is_sleeping": bool(self.asleep)})),
                    web.post("/collective_rpc", self.rpc),
                    web.post("/reset_prefix_cache", self.reset),
                ]
            )
        return app

    # -- generating

    async def complete(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        how = orders()
        if how.status:
            headers = {"Retry-After": "7"} if how.status == 429 else None
            return error(how.status, "as ordered", headers=headers)
        body = await request.json()
        prompt = prompt_ids(body, chat)
        if refused := self.refuse(body, len(prompt)):
            return refused
        # A completion that doesn't say is one of 16; a chat gets what is left (get_max_tokens).
        asked = body.get("max_tokens", self.context if chat else 16)
        body["max_tokens"] = min(asked, self.context - len(prompt))
        self.waiting += 1
        try:
            await self.awake.wait()
            await self.slots.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        self.kv += len(prompt)
        try:
            return await self.answer(request, body, prompt, chat=chat)
        finally:
            self.running -= 1
            self.kv = self.kv if self.running else 0
            self.slots.release()

    def refuse(self, body: dict[str, Any], prompt: int) -> web.Response | None:
        """The length asked for may go beyond what the prompt leaves, not beyond the whole context."""
        if body.get("model") != self.model:
            return error(404, f"The model `{body.get('model')}` does not exist.", "model")
        if body.get("max_tokens", 16) < 1:
            return error(400, f"max_tokens must be at least 1, got {body['max_tokens']}.", "max_tokens")
        if body.get("max_tokens", 16) > self.context:
            text = f"max_tokens={body['max_tokens']} cannot be greater than max_model_len={self.context}."
            return error(400, f"{text} Please request fewer output tokens.", "max_tokens")
        if prompt > self.context:
            text = (
                f"This model's maximum context length is {self.context} tokens. However, your prompt contains"
            )
            return error(400, f"{text} {prompt} input tokens, which exceeds this limit", "input_tokens")
        if prompt == self.context:
            return error(400, "max_tokens must be at least 1, got 0.", "max_tokens")
        ids = body.get("prompt")
        if isinstance(ids, list) and any(not 0 <= one < lm.VOCABULARY for one in ids):
            return error(400, f"Token id {max(ids)} is out of vocabulary")
        return None

    async def answer(
        self, request: web.Request, body: dict[str, Any], prompt: list[int], *, chat: bool
    ) -> web.StreamResponse:
        assert body.get("stream"), "the engine streams always"
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await out.prepare(request)
        say = Chunks(out, next(self.numbers), self.model, chat, bool(body.get("return_token_ids")))
        await say.begin(prompt)
        made = 0
        async for token, text, finish in self.steps(body, prompt):
            if made == orders().cut_after and request.transport is not None:
                request.transport.abort()
                return out
            await say.token(token, text, finish, prompt if made == 0 else None)
            made += 1
        await say.end(len(prompt), made, usage=(body.get("stream_options") or {}).get("include_usage"))
        return out

    async def steps(self, body: dict[str, Any], prompt: list[int]) -> Any:
        """(id, text, why it ended); a stop string and what follows it is left out, as vLLM does."""
        stops, most = body.get("stop") or [], body["max_tokens"]
        seed, ends = body.get("seed", 0) + self.garbage + 1000 * self.stale, not body.get("ignore_eos")
        salted = [*prompt, self.garbage, self.stale] if self.garbage or self.stale else prompt
        said = sent = ""
        for index, token in enumerate(lm.tokens(salted, seed, body.get("temperature", 1.0), ends=ends)):
            how = orders()
            if index == how.die_after:
                os.kill(os.getpid(), signal.SIGKILL)
            if index == how.hang_after:
                await asyncio.Event().wait()
            await asyncio.sleep(how.step_ms / 1000)
            self.made += 1
            self.prompts += len(prompt) if index == 0 else 0
            said += lm.text_of(token, index)
            hit = min((said.find(stop) for stop in stops if stop in said), default=-1)
            end = token == lm.EOS or hit >= 0
            finish = "stop" if end else "length" if index + 1 == most else None
            text = said[:hit] if hit >= 0 else said if finish else said[: sure(said, stops)]
            yield token, text[len(sent) :], finish
            sent = text
            if finish:
                return

    # -- sleeping

    async def sleep(self, request: web.Request) -> web.Response:
        how = orders().sleep
        if how == "error":
            return error(500, "as ordered")
        if how != "lie":
            self.asleep = {"weights", "kv_cache"}
            self.awake.clear()
            self.loaded = request.query["level"] == "1"
            self.stale = request.query["level"] == "2" or self.stale
            # Without sleep mode real vLLM says the same and keeps everything (tried on a CPU).
            if how != "keep" and self.can_sleep:
                self.weights = bytearray()
        return await json_answer({"status": "sleeping", "level": int(request.query["level"])})

    async def wake(self, request: web.Request) -> web.Response:
        how, tags = orders().wake, set(request.query.getall("tags", ["weights", "kv_cache"]))
        if how == "oom":
            return error(500, "CUDA Error: out of memory at cumem_allocator.cpp:62")
        if "kv_cache" in tags and not self.loaded:
            return error(500, "an illegal memory access was encountered")
        if how != "lie":
            self.asleep -= tags
            self.weights = self.weights or bytearray(b"w" * (orders().weights_mb * MIB))
            self.garbage += how == "garbage"
        if not self.asleep:
            self.awake.set()
        return await json_answer({"status": "sleeping" if self.asleep else "awake"})

    async def rpc(self, request: web.Request) -> web.Response:
        assert (await request.json())["method"] == "reload_weights"
        if "weights" in self.asleep:
            return error(500, "weights are not mapped")
        self.loaded = True
        return await json_answer({"results": [None]})

    async def reset(self, _: web.Request) -> web.Response:
        self.stale = False
        return await json_answer({"success": True})

    # -- telling

    async def models(self, _: web.Request) -> web.Response:
        one = {"id": self.model, "object": "model", "owned_by": "vllm", "max_model_len": self.context}
        return await json_answer({"object": "list", "data": [one]})

    async def metrics(self, _: web.Request) -> web.Response:
        labels = f'{{engine="0",model_name="{self.model}"}}'
        rows = {
            "num_requests_running": ("gauge", self.running),
            "num_requests_waiting": ("gauge", self.waiting),
            "kv_cache_usage_perc": ("gauge", min(1.0, self.kv / KV_TOKENS)),
            "prompt_tokens_total": ("counter", self.prompts),
            "generation_tokens_total": ("counter", self.made),
            "num_preemptions_total": ("counter", 0),
        }
        lines = []
        for name, (kind, value) in rows.items():
            lines += [
                f"# HELP vllm:{name} As vLLM.",
                f"# TYPE vllm:{name} {kind}",
                f"vllm:{name}{labels} {value}",
            ]
        reason = f'{{engine="0",model_name="{self.model}",reason="capacity"}}'
        lines.append(f"vllm:num_requests_waiting_by_reason{reason} 5.0")
        cache = f'{{block_size="{BLOCK}",engine="0",kv_cache_size_tokens="{KV_TOKENS}",num_gpu_blocks="256"}}'
        lines.append(f"vllm:cache_config_info{cache} 1.0")
        return web.Response(text="\n".join(lines) + "\n")


async def serve(args: argparse.Namespace) -> None:
    await asyncio.sleep(orders().late_s)
    runner = web.AppRunner(Server(args).app(), access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, args.host, args.port).start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("--model", "--served-model-name", "--host", "--dtype", "--uvicorn-log-level"):
        parser.add_argument(name)
    for name in ("--port", "--max-model-len", "--max-num-seqs"):
        parser.add_argument(name, type=int)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--enable-sleep-mode", action="store_true")
    args = parser.parse_args()
    args.dev = os.environ.get("VLLM_SERVER_DEV_MODE") == "1"
    if (status := orders().exit) >= 0:
        sys.exit(status)
    # Real vLLM's engine core lives on when its server is killed.
    core = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(args))
    core.kill()
    core.wait()
