"""What we ask an OpenAI-compatible server for.

Law: pure. A GenerateRequest in, path and JSON body out. Names: OpenAI's API reference; `ignore_eos` and
`return_token_ids` are vLLM's and go out only where they are understood or asked for.
"""

from __future__ import annotations

from typing import Any

from services.engine import GenerateRequest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_SEEDS = 2**63


def wire(request: GenerateRequest, model: str, *, token_ids: bool) -> tuple[str, dict[str, Any]]:
    """(path, body). model: as the server calls it. token_ids: ask for the ids of prompt and tokens.

    The answer is always streamed: only so can a client that goes away be noticed in the middle. A length that
    the client didn't name isn't named here either: the server knows what its context leaves.
    """
    body: dict[str, Any] = {
        "model": model,
        "temperature": request.temperature,
        "top_p": request.top_p,
        # Choices of one request differ by seed: asked one by one they would all be the same.
        "seed": (request.seed + request.sample) % _SEEDS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    # A completion that doesn't say gets 16 by OpenAI's API: what is open-ended there is a chat.
    if not (request.open_ended and request.messages):
        body["max_tokens"] = request.max_tokens
    if request.stop:
        body["stop"] = list(request.stop)
    if request.ignore_eos:
        body["ignore_eos"] = True
    if token_ids:
        body["return_token_ids"] = True
    if request.messages:
        return CHAT, body | {"messages": [{"role": m.role, "content": m.content} for m in request.messages]}
    return COMPLETIONS, body | {"prompt": list(request.prompt_ids) or request.prompt}
