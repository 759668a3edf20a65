"""Which GPU a vLLM is bound to: one truth for the engine, the pool and Consul."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from services import main
from services.assembly import Stack
from services.devices.door import Binding
from services.devices.host import CPU


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Options that the engine was made with last."""
    seen: dict[str, str] = {}
    monkeypatch.setattr(main, "assemble", lambda stack, *_: seen.update(stack.options))
    return seen


def stack(**options: str) -> Stack:
    return Stack("vllm", "m", options)


def wanted(engine: Stack, device: str = "") -> str:
    settings: Any = SimpleNamespace(device=device, stack=engine)
    return main._wanted(settings)


@pytest.mark.parametrize(
    ("options", "device", "bound"),
    [
        ({"device": "GPU-A"}, "", "GPU-A"),
        ({"device": "GPU-A,GPU-B"}, "", "GPU-A"),
        ({"device": "GPU-A"}, "GPU-B", "GPU-B"),
        ({}, "", ""),
    ],
)
def test_the_option_is_the_place_that_all_are_told(
    options: Mapping[str, str], device: str, bound: str
) -> None:
    assert wanted(stack(**options), device) == bound


@pytest.mark.parametrize(
    ("options", "where", "given"),
    [
        ({"device": "GPU-A"}, "GPU-A", "GPU-A"),
        ({"device": "GPU-A"}, "GPU-B", "GPU-B"),
        ({}, "GPU-B", "GPU-B"),
        ({"device": "GPU-A,GPU-B"}, "GPU-A", "GPU-A,GPU-B"),
        ({"device": "GPU-A,GPU-B"}, "GPU-C", "GPU-C"),
        ({"device": "GPU-A"}, CPU, "GPU-A"),
    ],
)
def test_a_move_moves_it(seen: dict[str, str], options: Mapping[str, str], where: str, given: str) -> None:
    clock: Any = None
    main._engine(stack(**options), Binding(where, CPU if where == CPU else "cuda:1", {}), clock)
    assert seen["device"] == given
