"""`weir up --engine torch`: a real model behind a real mesh answers through the ingress.

Law: a world of its own, taken down at the end. No test looks at what the model says: token ids are compared
with those that transformers makes from the same files in the same test.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from services.models.store import find
from tests.e2e.mesh_world import MeshWorld, brought_up

pytestmark = [pytest.mark.real, pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(400)]

REGION, MODEL, ROOT = "cn-north-1", "smollm2-135m-instruct", "https"
CHAT = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
TOKENS = 16


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshWorld]:
    """One region with a stable instance and a canary of the real model."""
    wish = ("--engine", "torch", "--regions", REGION, "--subnet", "129")
    with brought_up(tmp_path_factory.mktemp("torch") / ".weir", *wish) as world:
        yield world


@pytest.fixture
def client(thinking: MeshWorld) -> Iterator[openai.OpenAI]:
    trust = ssl.create_default_context(cafile=str(thinking.world.ca_file))
    where = thinking.world.address(REGION).ingress_https
    with (
        openai.DefaultHttpxClient(verify=trust) as http,
        openai.OpenAI(base_url=f"{where}/chat/v1", api_key="none", http_client=http, max_retries=0) as made,
    ):
        yield made


def reference() -> list[int]:
    """Greedy token ids of the same chat by transformers, float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = find(MODEL)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    asked = tokenizer.apply_chat_template(
        CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.inference_mode():
        made = model.generate(**asked, max_new_tokens=TOKENS, do_sample=False)
    return [int(i) for i in made[0, asked["input_ids"].shape[1] :]]


def _ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(
        model=MODEL,
        messages=CHAT,  # type: ignore[arg-type]
        max_tokens=TOKENS,
        temperature=0,
        extra_body={"return_token_ids": True},
        **more,
    )


def test_a_chat_through_the_ingress_gives_the_tokens_of_the_reference(client: openai.OpenAI) -> None:
    expected = reference()
    whole = _ask(client)
    assert whole.choices[0].token_ids[: len(expected)] == expected
    assert whole.usage.completion_tokens == len(whole.choices[0].token_ids)
    streamed = list(_ask(client, stream=True))
    ids = [
        i for chunk in streamed for choice in chunk.choices for i in getattr(choice, "token_ids", None) or ()
    ]
    assert ids == whole.choices[0].token_ids
    text = "".join(c.choices[0].delta.content or "" for c in streamed if c.choices)
    assert text == whole.choices[0].message.content
    assert len(streamed) >= len(ids) / 2, "it came in one piece"


def test_the_answer_names_its_engine_and_colour(client: openai.OpenAI) -> None:
    answer = client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=CHAT,
        max_tokens=1,
        temperature=0,
        extra_headers={"x-weir-dye": "canary"},  # type: ignore[arg-type]
    )
    assert answer.headers["x-weir-engine"] == "torch"
    assert answer.headers["x-envoy-upstream-metadata"] == f"region={REGION};stage=canary"
    assert "kv_cache_usage_perc" in answer.headers["endpoint-load-metrics"]


def test_what_can_not_fit_is_refused_with_openai_s_own_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt=[1] * 9000, max_tokens=16)
    assert refused.value.code == "context_length_exceeded"
