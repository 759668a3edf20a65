"""Waking a torch instance on the CPU against starting it cold, and the memory it gives back while asleep.

Law: figures, no asserts. A real `weir executor` process of SmolLM2-135M, asked over HTTP like by anybody:
cold from the start of the process, page cache warm; awake again from the admin verb. In bfloat16 (the type of
its files, 257 MiB), which has the goal, and in float32 (513 MiB): a wake reads every weight once. Memory is
what the kernel says: of that many bytes of weights, and of KV cache that was written, how many left the
process when the engine went to sleep.
"""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from services.engine import Engine, GenerateRequest
from services.models.catalog import row as known
from services.models.prepare import prepare

NAME, MODEL = "wake", "smollm2-135m-instruct"
CLAIM = 39
"""1.82 s → 47 ms."""
COLD_STARTS, CYCLES, SEQUENCES = 3, 7, 4
START_LIMIT_S, ANSWER_LIMIT_S = 120.0, 60.0
PROMPT = "The river rises in the hills, and the weir below the mill holds it back. " * 12
TEXT = {"model": MODEL, "prompt": "The", "max_tokens": 1}


@dataclass(slots=True)
class Found:
    """Seconds of every turn."""

    cold_ready: list[float]
    cold_answer: list[float]
    wake_engine: list[float]
    wake: list[float]
    wake_answer: list[float]


def run() -> list[dict[str, Any]]:
    """Half a minute to a minute; the model is prepared first when it isn't there."""
    prepare(known(MODEL), lambda line: print(line, file=sys.stderr))
    made = []
    for dtype, goal in (("bfloat16", f"ratio >= {CLAIM}"), ("float32", "")):
        found = Found([], [], [], [], [])
        for number in range(COLD_STARTS):
            with _instance(found, dtype) as instance:
                if number == COLD_STARTS - 1:
                    _sleep_and_wake(instance, found)
        made += rows(found, dtype, goal)
    return [*made, asyncio.run(_memory()), asyncio.run(_proof())]


class _Instance:
    """One process and its two ports."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, admin: int) -> None:
        self.process, self.port, self.admin = process, port, admin

    def post(self, port: int, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        data = json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_LIMIT_S) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"POST {path}: {error.code} {error.read().decode()[:500]}") from error

    def wait_ready(self, until: float) -> None:
        while time.perf_counter() < until:
            if self.process.poll() is not None:
                raise RuntimeError(f"the executor ended with {self.process.returncode}")
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=1).close()
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.005)
        raise RuntimeError(f"not ready within {START_LIMIT_S:g} s")


@contextmanager
def _instance(found: Found, dtype: str) -> Iterator[_Instance]:
    """A cold start, timed to ready and to the first answer."""
    port, admin = _ports()
    weir = Path(sys.executable).parent / "weir"
    where = ["--listen", f"127.0.0.1:{port}", "--admin", f"127.0.0.1:{admin}", "--sidecar", "127.0.0.1:9"]
    what = ["--engine", "torch", "--model", MODEL, "--option", "device=cpu", "--option", f"dtype={dtype}"]
    who = ["--instance", "bench-wake", "--region", "bench"]
    started = time.perf_counter()
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", str(weir), "executor", *who, *where, *what],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        instance = _Instance(process, port, admin)
        instance.wait_ready(started + START_LIMIT_S)
        found.cold_ready.append(time.perf_counter() - started)
        instance.post(port, "/v1/completions", TEXT)
        found.cold_answer.append(time.perf_counter() - started)
        yield instance
    finally:
        process.kill()
        process.wait()


def _sleep_and_wake(instance: _Instance, found: Found) -> None:
    for _ in range(CYCLES):
        instance.post(instance.admin, "/sleep", {})
        started = time.perf_counter()
        outcome = instance.post(instance.admin, "/wake", {})["outcome"]
        found.wake.append(time.perf_counter() - started)
        instance.post(instance.port, "/v1/completions", TEXT)
        found.wake_answer.append(time.perf_counter() - started)
        found.wake_engine.append(sum(s["seconds"] for s in outcome["steps"] if s["name"] == "engine wakes"))


async def _memory() -> dict[str, Any]:
    """Share of weights and written KV cache that a sleeping engine gives back; in this process."""
    from services.engines import make_engine

    engine, me = make_engine("torch", {"device": "cpu", "dtype": "fp32"}, MODEL), psutil.Process()
    await engine.start()
    try:
        jobs = [GenerateRequest(f"r{i}", f"{i}. {PROMPT}", 8, ignore_eos=True) for i in range(SEQUENCES)]
        written = sum(map(engine.size, jobs)) + 7 * len(jobs)
        await asyncio.gather(*(_drain(engine, job) for job in jobs))
        facts, pool = engine.facts(), engine.stats().memory_bytes - engine.facts().weights_bytes
        held = facts.weights_bytes + pool * written // facts.kv_tokens
        awake = me.memory_info().rss
        await engine.sleep()
        back = awake - me.memory_info().rss
    finally:
        await engine.close()
    metric = f"memory given back, {facts.weights_bytes >> 20} MiB of weights, {written} tokens of KV"
    body = {"bench": NAME, "metric": metric, "value": back / (1 << 20), "unit": "MiB", "goal": "ratio >= 0.9"}
    return body | {"peer": "weights and written KV", "peer_value": held / (1 << 20)}


async def _proof() -> dict[str, Any]:
    """By how much of the logits the tensor shows that shows least, when it is lost."""
    from services.engines import make_engine
    from services.llama.engine import TorchEngine
    from services.llama.witness import COARSE, off_by

    engine = make_engine("torch", {"device": "cpu", "dtype": "bf16"}, MODEL)
    assert isinstance(engine, TorchEngine)
    await engine.start()
    try:
        core = engine._ready_core()
        before, shows = core.witness(), []
        for tensor in engine.model.weights.tensors.values():
            kept = tensor.clone()
            tensor.zero_()
            shows.append(off_by(before, core.witness()))
            tensor.copy_(kept)
    finally:
        await engine.close()
    metric = f"what a wake compares, one of {len(shows)} tensors lost: logits off by at least"
    body = {"bench": NAME, "metric": metric, "value": min(shows), "unit": "", "goal": "ratio >= 1"}
    return body | {"peer": "tolerance", "peer_value": COARSE}


async def _drain(engine: Engine, job: GenerateRequest) -> None:
    async for _ in engine.generate(job):
        pass


def _ports() -> tuple[int, int]:
    """Two that are free now."""
    with socket.socket() as one, socket.socket() as two:
        for each in (one, two):
            each.bind(("127.0.0.1", 0))
        return one.getsockname()[1], two.getsockname()[1]


def rows(found: Found, dtype: str, goal: str) -> list[dict[str, Any]]:
    """Medians. The ratio is cold ÷ awake, as the claim counts it."""
    ready, answer = statistics.median(found.cold_ready), statistics.median(found.cold_answer)
    return [
        _row(f"cold start to ready, {dtype}", ready, "engine wakes, checked", found.wake_engine),
        _row(f"cold start to ready, {dtype}", ready, "wake by the admin verb", found.wake, goal),
        _row(f"cold start to first answer, {dtype}", answer, "wake to first answer", found.wake_answer),
    ]


def _row(metric: str, value: float, peer: str, peers: list[float], goal: str = "") -> dict[str, Any]:
    peer_value = statistics.median(peers)
    body = {"bench": NAME, "metric": metric, "value": value, "unit": "s", "goal": goal}
    return body | {"peer": peer, "peer_value": peer_value}
