"""What runs before a world of an engine starts, and what doesn't because the person brings it along."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mesh.world.engines import ENGINES, SMALL_MODEL, needs, slower_s

TORCH, VLLM = ("setup", "--with", "torch", "--quiet"), ("setup", "--with", "vllm", "--quiet")
PREPARE = ("model", "prepare", SMALL_MODEL)


@pytest.mark.parametrize(
    ("engine", "model", "options", "commands"),
    [
        ("echo", "", (), ()),
        ("sim", "x", ("step_ms=1",), ()),
        ("torch", "", ("threads=2",), (TORCH, PREPARE)),
        ("torch", "/my/model", (), (TORCH,)),
        ("vllm", "", (), (TORCH, PREPARE, VLLM)),
        ("vllm", "", ("python=",), (TORCH, PREPARE, VLLM)),
        ("vllm", "", ("python=/opt/vllm/bin/python",), (TORCH, PREPARE)),
        ("vllm", "/my/model", ("max_model_len=1024", "python=/opt/vllm/bin/python"), ()),
    ],
)
def test_what_is_brought_along_is_not_fetched(
    engine: str, model: str, options: Sequence[str], commands: tuple[tuple[str, ...], ...]
) -> None:
    assert needs(engine, model, options) == commands


def test_nothing_is_waited_for_less_than_an_echo() -> None:
    assert slower_s("echo") == 0
    assert {slower_s(engine) >= 0 for engine in ENGINES} == {True}
    assert slower_s("vllm") > slower_s("torch") > 0
