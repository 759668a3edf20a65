"""`weir executor --fallback`: the stack as the process puts it together, and what its answers say of it."""

from __future__ import annotations

import contextlib
import http.client
import json
from pathlib import Path
from typing import Any

import pytest

from tests.contract.executor_process import PORT, WAIT_S, Executor, executor

pytestmark = pytest.mark.real

RULES = """\
rules:
  - when: sequence_length
    over: 40
    codes: [kv_never_fits, context_length_exceeded]
  - when: engine_error
"""
SECONDS = "weir_fallback_seconds_total"


def asked(it: Executor, **body: Any) -> tuple[int, dict[str, str], Any]:
    """Status, headers by lower-case name, and the parsed answer."""
    with contextlib.closing(http.client.HTTPConnection(it.ip, PORT, timeout=WAIT_S)) as line:
        line.request("POST", "/v1/completions", json.dumps({"temperature": 0, **body}))
        answer = line.getresponse()
        told = {name.lower(): value for name, value in answer.getheaders()}
        return answer.status, told, json.loads(answer.read())


def figures(it: Executor, name: str) -> dict[str, float]:
    """Samples of a metric by the label that tells them apart."""
    found = {}
    for line in it.ask("GET", "/metrics")[1].splitlines():
        if line.startswith(name + "{"):
            labels, _, value = line.rpartition(" ")
            kind = "reason" if 'reason="' in labels else "engine"
            found[labels.split(f'{kind}="')[-1].split('"')[0]] = float(value)
    return found


def test_the_second_engine_answers_by_the_rules_of_a_file_and_says_so(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES)
    two = ("--engine", "sim", "--fallback", "echo", "--fallback-rules", str(rules))
    with executor(tmp_path, "127.107.16.1", *two) as it:
        status, told, body = asked(it, prompt="short", max_tokens=4)
        assert (status, told["x-weir-engine"], "x-weir-fallback" in told) == (200, "sim", False)
        status, told, body = asked(it, prompt="long", max_tokens=60)
        assert (status, body["usage"]["completion_tokens"]) == (200, 60)
        assert (told["x-weir-engine"], told["x-weir-fallback"]) == ("echo", "sequence_length")
        assert body["model"] == "echo-1", "never another model"
        assert figures(it, "weir_fallback_requests_total") == {
            "sequence_length": 1, "fragmentation": 0, "engine_error": 0, "queue_full": 0
        }  # fmt: skip
        assert figures(it, SECONDS)["sequence_length"] > 0


def test_a_first_engine_that_dies_is_answered_for_and_told(tmp_path: Path) -> None:
    dies = ("--engine", "sim", "--option", "die_after=0", "--fallback", "echo")
    with executor(tmp_path, "127.107.16.2", *dies) as it:
        for _ in range(2):
            status, told, _ = asked(it, prompt="x", max_tokens=4)
            assert (status, told["x-weir-engine"], told["x-weir-fallback"]) == (200, "echo", "engine_error")
        assert (it.get("/health"), it.get("/ready")) == (200, 200)
        assert figures(it, "weir_fallback_engine_dead") == {"primary": 1, "secondary": 0}
        assert figures(it, "weir_fallback_requests_total")["engine_error"] == 2


@pytest.mark.torch
def test_the_torch_engine_without_its_cache_gives_the_tokens_it_gives_with_it(tmp_path: Path) -> None:
    from tests.llama_models import build

    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES)
    words = ("device=cpu", "dtype=float32", "threads=1", "kv_tokens=512")
    model = ("--engine", "torch", "--model", str(build(tmp_path / "tiny")))
    options = tuple(part for word in words for part in ("--option", word))
    more = ("--fallback", "layerwise", "--fallback-rules", str(rules))
    with executor(tmp_path, "127.107.16.3", *model, *options, *more) as it:
        ask = {"prompt": [5, 6, 7, 8], "ignore_eos": True, "return_token_ids": True}
        _, told, short = asked(it, max_tokens=30, **ask)
        assert told["x-weir-engine"] == "torch"
        _, told, long = asked(it, max_tokens=50, **ask)
        assert (told["x-weir-engine"], told["x-weir-fallback"]) == ("torch-layerwise", "sequence_length")
        ids = [answer["choices"][0]["token_ids"] for answer in (short, long)]
        assert len(ids[1]) == 50
        assert ids[1][:30] == ids[0]
