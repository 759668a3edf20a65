"""The engines that the contract suite runs on, and the servers that some of them need.

Law: helpers only; every process dies with its `with`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mesh.clock import SystemClock
from services.devices.checkpoint import available
from services.engines import make_engine
from services.vllm.engine import VllmEngine
from services.vllm.memory import on_host
from services.vllm.process import free_port
from services.vllm.settings import parse
from tests.contract.engine_suite import PROMPTS, Subject
from tests.contract.executor_process import executor
from tests.fakes.vllm_python import fake_python
from tests.fakes.vllm_wire import ORDERS

NO_COST = {"step_ms": 2}
STAND_IN = "stand-in-1"


def echo() -> Subject:
    return Subject(
        lambda: make_engine("echo", {"token_cost_ms": "2"}, "e"),
        "echo",
        vocabulary=False,
        context=False,
        sampled=False,
        prompts=PROMPTS,
    )


def sim() -> Subject:
    options = {"step_ms": "2", "seq_ms": "0", "context": "4096"}
    return Subject(lambda: make_engine("sim", options, "s"), "sim", vocabulary=False, prompts=PROMPTS)


def torch(folder: Path) -> Subject:
    """On a tiny model with random weights, a byte a token."""
    from tests.llama_models import build

    model = build(folder / "tiny")
    options = {"threads": "1", "kv_tokens": "1024", "dtype": "float32", "device": "cpu"}
    return Subject(lambda: make_engine("torch", options, str(model)), "torch", prompts=PROMPTS)


class Orders:
    """What the stand-in is to do from now on."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "orders.json"
        self.give()

    def give(self, **orders: Any) -> None:
        """In place of all that was ordered before. The file is there whole or not at all."""
        fresh = self.file.with_suffix(".new")
        fresh.write_text(json.dumps(NO_COST | orders))
        fresh.replace(self.file)


def stand_in(
    folder: Path, measure: Any = on_host, checkpoints: Any = available, **options: Any
) -> VllmEngine:
    """The vllm engine on the stand-in, as on a GPU: with sleep levels. Its environment must have ORDERS."""
    python = folder / "python"
    if not python.exists():
        fake_python(folder, cuda="13.0")
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    given = {
        "python": str(python),
        "metrics_s": "0.05",
        "settle_s": "0.5",
        "max_model_len": "1024",
        "start_s": "200",
        "log": str(folder / "vllm.log"),
    } | {name: str(value) for name, value in options.items()}
    how = (lambda gpu, uuid: measure, checkpoints)
    return VllmEngine(parse(given), STAND_IN, model, SystemClock(), *how)


def vllm(folder: Path) -> Subject:
    return Subject(lambda: stand_in(folder), "vllm", prompts=PROMPTS)


@contextlib.contextmanager
def stand_in_server(folder: Path, env: Mapping[str, str]) -> Iterator[str]:
    """The stand-in as somebody else's server. Gives its base URL; wait for it by starting an engine."""
    python, port = fake_python(folder), free_port()
    argv = ["setpriv", "--pdeathsig", "KILL", str(python), "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--model", "x", "--served-model-name", STAND_IN, "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "server.log").open("ab") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log, env={**os.environ, **env}, process_group=0)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()  # it ends its own child
        process.wait(timeout=60)


@contextlib.contextmanager
def openai_on_stand_in(folder: Path, orders: Orders) -> Iterator[Subject]:
    with stand_in_server(folder, {ORDERS: str(orders.file)}) as url:
        options = {"base_url": url, "start_s": "200"}
        yield Subject(lambda: make_engine("openai", options, STAND_IN), "openai", prompts=PROMPTS)


@contextlib.contextmanager
def openai_on_executor(folder: Path, ip: str) -> Iterator[Subject]:
    """Our own executor with the sim engine as the server."""
    options = ("--engine", "sim", "--option", "step_ms=2", "--option", "context=4096")
    with executor(folder, ip, *options) as it:
        url = {"base_url": f"http://{it.ip}:9000/v1"}
        yield Subject(
            lambda: make_engine("openai", url, "echo-1"),
            "openai",
            vocabulary=False,
            context=False,
            prompts=PROMPTS,
        )
