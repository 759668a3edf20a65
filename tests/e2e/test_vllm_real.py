"""Real vLLM on the CPU behind a real executor: installed, started, asked, cancelled, killed.

Law: one executor for all tests of this file, in the order they stand: the last one kills its vLLM. No test
looks at what the model says; ids are compared with ids. Times and memory are printed as JSON rows, never
asserted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import openai
import psutil
import pytest

from services.engines import make_engine
from tests.contract import executor_process
from tests.contract.engine_suite import CHECKS, PROMPTS, Subject
from tests.contract.executor_process import WEIR, Executor, executor, until

pytestmark = [
    pytest.mark.real,
    pytest.mark.torch,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(660),
]

IP, MODEL = "127.107.6.20", "smollm2-135m-instruct"
READY_S = 420.0
OPTIONS = ("dtype=float32", "max_model_len=1024", "metrics_s=0.2", f"start_s={READY_S:g}")
PROMPT = "The capital of France is"
TOKENS = 12
# Through HTTP there is no context to be told, and vLLM promises the same tokens only for the same batch.
CHECKED = sorted(set(CHECKS) - {"statistics_tell_what_was_done"})


def timed(what: str, act: Callable[[], Any]) -> Any:
    begun = time.monotonic()
    made = act()
    print(json.dumps({"what": what, "seconds": round(time.monotonic() - begun, 1)}))
    return made


def weir(*argv: str) -> None:
    subprocess.run([WEIR, *argv], check=True, stdin=subprocess.DEVNULL)


def said(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def below(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    timed("model prepare", lambda: weir("model", "prepare", MODEL))
    timed("vllm install", lambda: weir("setup", "consul", "--with", "vllm", "--quiet"))
    options = ("--engine", "vllm", "--model", MODEL, *(x for o in OPTIONS for x in ("--option", o)))
    folder = tmp_path_factory.mktemp("vllm")
    with (
        pytest.MonkeyPatch.context() as patch,
        executor(folder, IP, *options, "--option", f"log={folder / 'vllm.log'}", wait=False) as it,
    ):
        patch.setattr(executor_process, "READY_TIMEOUT_S", READY_S)
        timed("vllm start", it.ready_line)
        rss = {}
        for p in [psutil.Process(it.process.pid), *below(it.process.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):  # some live for a moment only
                rss[p.name()] = p.memory_info().rss // 2**20
        print(json.dumps({"what": "resident MiB", **rss}))
        yield it


@pytest.fixture
def client(serving: Executor) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{IP}:9000/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


def ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=TOKENS,
        temperature=0,
        extra_body={"return_token_ids": True},
        **more,
    )


def reference() -> list[int]:
    """Greedy ids of the same prompt by transformers, float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from services.models.store import find

    tokenizer = AutoTokenizer.from_pretrained(find(MODEL))
    model = AutoModelForCausalLM.from_pretrained(find(MODEL), dtype=torch.float32)
    asked = tokenizer(PROMPT, return_tensors="pt")
    with torch.inference_mode():
        made = model.generate(**asked, max_new_tokens=TOKENS, do_sample=False)
    return [int(i) for i in made[0, asked["input_ids"].shape[1] :]]


def test_greedy_ids_are_those_of_transformers_streamed_and_whole(client: openai.OpenAI) -> None:
    whole = ask(client)
    streamed = list(ask(client, stream=True, stream_options={"include_usage": True}))
    ids = [i for chunk in streamed for choice in chunk.choices for i in choice.token_ids]
    assert whole.choices[0].token_ids == ids == reference()
    assert "".join(c.text for chunk in streamed for c in chunk.choices) == whole.choices[0].text
    assert streamed[-1].usage == whole.usage
    assert whole.usage.completion_tokens == TOKENS
    assert whole.usage.prompt_tokens > 0
    assert whole.choices[0].finish_reason == "length"


def test_a_chat_is_rendered_by_the_model_s_own_template(client: openai.OpenAI) -> None:
    said: Any = [{"role": "user", "content": "Hello"}]
    answer = client.chat.completions.create(model=MODEL, messages=said, max_tokens=4, temperature=0)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 10, "the template adds a system prompt and marks of its own"


def test_what_vllm_refuses_reaches_the_client_as_its_own_fault(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=[1, 2, 10**7], max_tokens=2)
    assert "vocabulary" in str(caught.value)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="x", max_tokens=5000)
    assert caught.value.code == "context_length_exceeded"


def test_vllm_s_own_metrics_are_carried_on(serving: Executor, client: openai.OpenAI) -> None:
    ask(client)

    def carried() -> bool:
        text = serving.ask("GET", "/metrics")[1]
        rows = [x for x in text.splitlines() if x.startswith("vllm:prefix_cache_queries_total{")]
        return bool(rows) and float(rows[0].rsplit(" ", 1)[1]) > 0 and "vllm:request_queue_time" in text

    until("the server's own counters", carried)


def test_the_answer_carries_a_load_report(client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(model=MODEL, prompt=PROMPT, max_tokens=2)
    report = raw.headers["endpoint-load-metrics"]
    assert report.startswith("TEXT ")
    # By the name that it has in vLLM's own report: one of ours would be there without any vLLM.
    assert "named_metrics.num_requests_waiting=0" in report


def test_a_client_that_leaves_frees_vllm(serving: Executor) -> None:
    def running() -> float:
        text = serving.ask("GET", "/metrics")[1]
        [row] = [x for x in text.splitlines() if x.startswith("weir_executor_running ")]
        return float(row.split()[1])

    stream = serving.stream(model=MODEL, prompt=PROMPT, max_tokens=900, ignore_eos=True)
    stream.take(2)
    until("it runs", lambda: running() == 1)
    stream.close()
    until("nothing runs", lambda: running() == 0)


@pytest.mark.parametrize("check", CHECKED)
def test_the_contract_of_engines(serving: Executor, check: str) -> None:
    """The openai engine on the executor on vLLM: three of our layers and one of theirs."""
    options = {"base_url": f"http://{IP}:9000"}
    it = Subject(
        lambda: make_engine("openai", options, MODEL),
        "openai",
        context=False,
        invariant=False,
        prompts=PROMPTS,
    )

    async def run() -> None:
        engine = it.make()
        await engine.start()
        try:
            await CHECKS[check](it, engine)
        finally:
            await engine.close()

    asyncio.run(run())


def test_killed_it_is_dead_and_leaves_nothing(serving: Executor) -> None:
    """The server process alone is killed: its engine core and worker would live on by themselves."""
    family = below(serving.process.pid)
    [leash] = psutil.Process(serving.process.pid).children()
    [server] = [p for p in leash.children() if "vllm.entrypoints" in said(p)]
    assert len(family) > 3
    server.kill()
    until("/health says so", lambda: serving.get("/health") == 503)
    until("nothing is left", lambda: not any(p.is_running() for p in family))
    status, body = serving.ask("POST", "/v1/completions", {"model": MODEL, "prompt": PROMPT})
    assert (status, body["error"]["code"]) == (503, "engine_dead")
    serving.signal(signal.SIGTERM)
    assert serving.ended() == 0
