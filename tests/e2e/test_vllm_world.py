"""`weir up --engine vllm` as an operator types it, on the stand-in: through the mesh it is vLLM that answers.

Law: the smallest world there is, taken down at the end. What vLLM itself does is tests/contract's.
"""

from __future__ import annotations

import json
import ssl
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.mesh_world import MeshWorld, brought_up
from tests.fakes.vllm_python import fake_python

pytestmark = [pytest.mark.real, pytest.mark.timeout(200)]

REGION = "cn-north-1"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[MeshWorld]:
    """One region, one instance. Model and interpreter are brought along, so nothing is fetched."""
    model, python = tmp_path / "model", fake_python(tmp_path)
    model.mkdir()
    (model / "config.json").write_text("{}")
    brought = ("--model", str(model), "--option", f"python={python}", "--option", "max_model_len=1024")
    wish = ("--engine", "vllm", "--regions", REGION, "--subnet", "128", *brought)
    with brought_up(tmp_path / ".weir", *wish) as world:
        yield world


def test_a_request_through_the_ingress_is_answered_by_vllm(served: MeshWorld) -> None:
    trust = ssl.create_default_context(cafile=str(served.world.ca_file))
    url = f"{served.world.address(REGION).ingress_https}/chat/v1/completions"
    # Without ignore_eos the model may end sooner: a dice decides, for no seed is given.
    body = json.dumps({"prompt": "how deep is the water", "max_tokens": 5, "ignore_eos": True}).encode()
    asked = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=20, context=trust) as answer:
        told = json.load(answer)
        assert answer.headers["x-weir-engine"] == "vllm"
        assert answer.headers["x-envoy-upstream-metadata"] == f"region={REGION};stage=stable"
    assert told["usage"]["completion_tokens"] == 5
