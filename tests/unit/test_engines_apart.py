"""No engine is imported unless used, and a light executor stays light."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from services.engines import ENGINES

HEAVY = ("torch", "transformers", "safetensors", "tokenizers", "numpy", "pydantic", "opentelemetry", "pynvml")
CODE = """
import json, sys
import services.main
from random import Random
from mesh.clock import SystemClock
from services.assembly import Stack, assemble
name, options = sys.argv[1], json.loads(sys.argv[2])
assemble(Stack(name, "m", options), SystemClock(), Random(0))
print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.parametrize(
    ("name", "options"), [("echo", {}), ("sim", {}), ("openai", {"base_url": "http://x"})]
)
def test_a_light_executor_imports_its_engine_alone(name: str, options: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, name, json.dumps(options)], capture_output=True, text=True, check=True
    )
    loaded = set(json.loads(done.stdout))
    here = {module.rpartition(".")[2] for module in loaded if module.startswith("services.engines.")}
    assert here == {name}
    assert set(ENGINES) > here
    assert not loaded & set(HEAVY)
    assert not [module for module in loaded if module.startswith(("services.llama", "services.vllm"))]
