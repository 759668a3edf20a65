"""The official `openai` client through the ingress, over TLS: whole, streamed, refused; and what comes back
with it."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.mesh_world import MeshWorld

pytestmark = [pytest.mark.real, pytest.mark.torch, pytest.mark.timeout(240)]

HERE = "us-east-1"
HI: Any = [{"role": "user", "content": "how deep is the water"}]


@pytest.fixture
def client(calm: MeshWorld) -> Iterator[Any]:
    import httpx2
    import openai

    trust = ssl.create_default_context(cafile=str(calm.world.ca_file))
    base = calm.world.address(HERE).ingress_https + "/chat/v1"
    with (
        httpx2.Client(verify=trust, http2=False) as http,
        openai.OpenAI(base_url=base, api_key="none", max_retries=0, timeout=30, http_client=http) as it,
    ):
        yield it


def test_a_stream_through_the_ingress_says_what_the_whole_answer_says(client: Any) -> None:
    ask = {"model": "echo-1", "messages": HI, "max_tokens": 40, "seed": 4, "n": 2}
    whole = client.chat.completions.create(**ask)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.usage.completion_tokens == 80
    texts = ["", ""]
    for chunk in client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content
    assert texts == [choice.message.content for choice in whole.choices]
    assert chunk.usage == whole.usage


def test_refusals_keep_their_form_through_the_mesh(client: Any) -> None:
    import openai

    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="echo-1", messages=HI, n=1000)
    assert caught.value.param == "n"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-9", prompt="hi")
    assert missing.value.code == "model_not_found"


def test_what_the_executor_says_of_itself_arrives_once(client: Any, calm: MeshWorld) -> None:
    raw = client.completions.with_raw_response.create(
        model="echo-1", prompt="hi", max_tokens=1, extra_headers={"x-weir-tenant": "gold-demo"}
    )
    headers = raw.headers
    assert headers["x-weir-engine"] == "echo"
    assert headers["x-weir-region"] in calm.names
    assert headers["endpoint-load-metrics"].startswith("TEXT ")
    assert len(headers.get_list("x-request-id")) == 1
    assert raw.request_id == headers["x-request-id"]
