"""What the stand-in for vLLM says on the wire, and what it was ordered to do.

Law: shapes are copied from answers of vLLM 0.32.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.fakes import vllm_model as lm

ORDERS = "FAKE_VLLM_ORDERS"
"""Environment variable: path of the file."""


@dataclass(frozen=True, slots=True)
class Orders:
    """step_ms: price of a token. status: instead of an answer (429, 500, 503). cut_after, hang_after,
    die_after: tokens until the stream is cut, hangs, the process is gone; -1: never. sleep: "ok", "lie" (200
    and awake), "keep" (asleep, gives nothing back), "error". wake: "ok", "oom", "lie" (200 and asleep),
    "garbage" (other tokens than before). weights_mb: held in memory while awake. late_s: from start to the
    first answer. exit: at start, with this status; -1: don't.
    """

    step_ms: float = 0.0
    status: int = 0
    cut_after: int = -1
    hang_after: int = -1
    die_after: int = -1
    sleep: str = "ok"
    wake: str = "ok"
    weights_mb: int = 96
    late_s: float = 0.0
    exit: int = -1


def orders() -> Orders:
    """As the file says now; defaults without one."""
    try:
        said = json.loads(Path(os.environ[ORDERS]).read_text())
    except (KeyError, FileNotFoundError, ValueError):
        return Orders()  # ValueError: the file is being written
    return Orders(**{f.name: said[f.name] for f in fields(Orders) if f.name in said})


def sure(said: str, stops: list[str]) -> int:
    """How much of the text can't be the beginning of a stop string."""
    longest = max((n for stop in stops for n in range(1, len(stop)) if said.endswith(stop[:n])), default=0)
    return len(said) - longest


class Chunks:
    """Writes the events of one answer."""

    def __init__(self, out: web.StreamResponse, number: int, model: str, chat: bool, ids: bool) -> None:
        kind = "chat.completion.chunk" if chat else "text_completion"
        self._head = {"id": f"{number}", "object": kind, "created": 0, "model": model}
        self._out, self._chat, self._ids = out, chat, ids

    async def _write(self, body: dict[str, Any]) -> None:
        await self._out.write(b"data: " + json.dumps(self._head | body).encode() + b"\n\n")

    async def begin(self, prompt: list[int]) -> None:
        if self._chat:
            delta = {"role": "assistant", "content": ""}
            more = {"prompt_token_ids": prompt} if self._ids else {}
            await self._write({"choices": [{"index": 0, "delta": delta, "finish_reason": None}], **more})

    async def token(self, token: int, text: str, finish: str | None, prompt: list[int] | None) -> None:
        content: dict[str, Any] = {"delta": {"content": text}} if self._chat else {"text": text}
        ids = {"token_ids": [token]} if self._ids else {}
        if self._ids and not self._chat:
            ids["prompt_token_ids"] = prompt  # type: ignore[assignment]
        await self._write({"choices": [{"index": 0, **content, "finish_reason": finish, **ids}]})

    async def end(self, prompt: int, made: int, *, usage: bool) -> None:
        if usage:
            used = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
            await self._write({"choices": [], "usage": used})
        await self._out.write(b"data: [DONE]\n\n")
        await self._out.write_eof()


def prompt_ids(body: dict[str, Any], chat: bool) -> list[int]:
    if chat:
        return lm.ids_of("".join(f"<{m['role']}>{m['content']}" for m in body["messages"]))
    return body["prompt"] if isinstance(body["prompt"], list) else lm.ids_of(body["prompt"])


async def json_answer(body: dict[str, Any]) -> web.Response:
    return web.json_response(body)


def error(
    status: int, message: str, param: str | None = None, headers: dict[str, str] | None = None
) -> web.Response:
    body = {"message": message, "type": "BadRequestError", "param": param, "code": status}
    return web.json_response({"error": body}, status=status, headers=headers)
