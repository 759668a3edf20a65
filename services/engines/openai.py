"""The openai engine: any server that speaks OpenAI's API (`vllm serve`, `trtllm-serve`, `llama-server`).

Law: an Engine around a client. The server is somebody else's: it is never started, slept or stopped from
here. A server that can't be reached lowers `capacity` to 0 until it answers again; nothing is broken for good
by it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from mesh.clock import Clock, SystemClock
from regions.cli.errors import UsageError, WeirError
from services.engine import EngineFacts, EngineStats, GenerateRequest, Token
from services.faults import EngineFault, Refused
from services.upstream.client import Target, Upstream
from services.upstream.options import read

log = logging.getLogger("weir.engine")

NAME = "openai"
ASK_AGAIN_S = 0.5
TELL_IDS = ("vllm", "weir")
"""`owned_by` of servers that know the field return_token_ids."""


@dataclass(frozen=True, slots=True)
class OpenAiOptions:
    """base_url: of the server, with or without `/v1`. api_key_env: name of the environment variable that
    holds the key; the key itself is never an option. model: the server's name for it, where it has another.
    ids: whether to ask for token ids: "auto" does where the server is known to tell them. Seconds: start_s to
    wait for the server at start; token_s between two tokens; connect_s.
    """

    base_url: str = ""
    api_key_env: str = ""
    model: str = ""
    ids: str = "auto"
    start_s: float = 30.0
    token_s: float = 300.0
    connect_s: float = 5.0


_LIMITS = {"start_s": (0.0, 86_400.0), "token_s": (0.001, 86_400.0), "connect_s": (0.001, 600.0)}


def make(model: str, options: Mapping[str, str]) -> OpenAiEngine:
    """model: the name that clients of this executor use. Raises UsageError."""
    it = read(OpenAiOptions, NAME, options, _LIMITS)
    if it.ids not in ("auto", "on", "off"):
        raise UsageError(f"engine option ids={it.ids!r}", "unknown", "auto, on or off")
    key = ""
    if it.api_key_env:
        key = os.environ.get(it.api_key_env, "")
        if not key:
            raise UsageError(
                f"engine option api_key_env={it.api_key_env!r}",
                "no such environment variable, or it is empty",
                f"export {it.api_key_env}=… before starting the executor",
            )
    target = Target(
        NAME,
        base_url(it.base_url),
        key,
        it.model or model,
        it.ids == "on",
        connect_s=it.connect_s,
        token_s=it.token_s,
    )
    return OpenAiEngine(it, model, target, SystemClock())


def base_url(text: str) -> str:
    """Scheme, host, port and path before `/v1`. Raises UsageError."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(
            f"engine option base_url={text!r}",
            "no URL of a server" if text else "is needed",
            "--option base_url=http://127.0.0.1:8000",
        )
    if parts.username or parts.password:
        raise UsageError("engine option base_url", "holds a password", "give the key by api_key_env")
    path = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}"


class OpenAiEngine:
    """An Engine. Cancelling is closing the iterator: the connection to the server closes with it."""

    def __init__(self, options: OpenAiOptions, model: str, target: Target, clock: Clock) -> None:
        self._options, self._clock = options, clock
        self._client = Upstream(target, clock)
        self._facts = EngineFacts(NAME, model, sleep_levels=(), estimates=True)
        self._started = self._closed = False
        self._running = self._tokens = self._prompt_tokens = 0
        self._gone: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Wait for the server and look for the model. Raises WeirError when either is not there."""
        if self._started:
            raise RuntimeError("the engine runs already")
        self._started = True
        found = self._model(await self._models())
        it = self._client.target
        ids = it.token_ids or (self._options.ids == "auto" and found.get("owned_by") in TELL_IDS)
        self._client.target = replace(it, model=str(found["id"]), token_ids=ids)
        context = found.get("max_model_len")
        self._facts = replace(self._facts, context=context if isinstance(context, int) and context > 0 else 0)

    def facts(self) -> EngineFacts:
        return self._facts

    def size(self, request: GenerateRequest) -> int:
        """Ids are counted, a text is guessed: services/upstream/size.py."""
        return self._client.ruler.size(request)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Token, None]:
        """Tokens as the server sends them. Raises Refused and EngineFault as services/upstream/verdict.py
        says, EngineHung when nothing comes for token_s, RuntimeError when not started."""
        if not self._started or self._closed:
            raise RuntimeError("the engine is closed" if self._closed else "the engine was not started")
        self._running += 1
        counted = False
        try:
            async with contextlib.aclosing(self._client.generate(request)) as tokens:
                async for token in tokens:
                    self._tokens += 1
                    if token.prompt_tokens and not counted:
                        counted = True
                        self._prompt_tokens += token.prompt_tokens
                    yield token
        except Refused:
            raise
        except EngineFault:
            self._suspect()
            raise
        finally:
            self._running -= 1

    async def sleep(self, level: int = 1) -> None:
        """Not here: Raises RuntimeError."""
        raise RuntimeError(f"the server at {self._client.target.base_url} is not ours to put to sleep")

    async def wake(self) -> None:
        """It never sleeps."""

    def stats(self) -> EngineStats:
        return EngineStats(
            self._running,
            tokens=self._tokens,
            prompt_tokens=self._prompt_tokens,
            capacity=0.0 if self._gone is not None else 1.0,
            named=self._client.load(),
        )

    async def close(self) -> None:
        self._closed = True
        if self._gone is not None:
            self._gone.cancel()
            await asyncio.wait((self._gone,))
        await self._client.close()

    async def _models(self) -> list[dict[str, Any]]:
        """What the server says it serves, when it answers. Raises WeirError after start_s."""
        end = self._clock.monotonic() + self._options.start_s
        while True:
            try:
                return _listed(await self._client.ask("GET", "/v1/models"))
            except EngineFault as error:
                if self._clock.monotonic() + ASK_AGAIN_S >= end:
                    raise WeirError(
                        f"server {self._client.target.base_url}",
                        str(error),
                        "start it first, or wait longer with --option start_s=SECONDS",
                    ) from error
            await self._clock.sleep(ASK_AGAIN_S)

    def _model(self, listed: list[dict[str, Any]]) -> dict[str, Any]:
        wanted = self._client.target.model
        for one in listed:
            if one["id"] == wanted:
                return one
        there = ", ".join(sorted(str(one["id"]) for one in listed)) or "none"
        raise WeirError(
            f"model {wanted!r}",
            f"the server {self._client.target.base_url} has not got it; it has: {there}",
            "--option model=NAME, as the server calls it",
        )

    def _suspect(self) -> None:
        """After a failure: ask until it answers."""
        if self._gone is None and not self._closed:
            self._gone = asyncio.create_task(self._until_back(), name="openai upstream back?")

    async def _until_back(self) -> None:
        while True:
            try:
                await self._client.ask("GET", "/v1/models")
                break
            except EngineFault as error:
                log.warning("the server %s: %s", self._client.target.base_url, error)
            await self._clock.sleep(2.0)
        self._gone = None


def _listed(text: str) -> list[dict[str, Any]]:
    """Models of a /v1/models answer. Raises EngineFault for anything else."""
    try:
        listed = json.loads(text)["data"]
        return [{**one, "id": one["id"]} for one in listed]
    except (ValueError, KeyError, TypeError) as error:
        raise EngineFault(f"/v1/models answered what is no list of models: {text[:200]!r}") from error
