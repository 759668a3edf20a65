"""The GPU bench on a machine without one: its arithmetic, its budget, and that every section runs.

What only a GPU can tell is not pretended: those figures are None here, with a note that says so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from math import isnan
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench import gpu
from tests.bench.gpu_rows import (
    CLAIM_FRAGMENTATION,
    SECTIONS,
    TOTAL_S,
    AttentionCase,
    Budget,
    OutOfTime,
    attention_cases,
    churn,
    decode_batches,
    failed,
    fragmentation,
    row,
    spread,
    stay,
    table,
)

ROOT = Path(__file__).parents[2]


class Hand:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


def test_five_minutes_are_enough() -> None:
    assert sum(SECTIONS.values()) <= TOTAL_S < gpu.HARD_LIMIT_S < 300


def test_a_section_leaves_the_later_ones_their_time() -> None:
    clock = Hand()
    budget = Budget(clock, 60, {"a": 10, "b": 20, "c": 30})
    first = budget.open("a")
    assert first.left_s == 10
    clock.s += 4
    assert budget.open("b").left_s == 26  # what `a` saved is there for `b`
    clock.s += 50
    assert budget.open("c").left_s == 6
    with pytest.raises(OutOfTime, match=r"0\.0 s left"):
        first.check()


def test_a_short_run_shrinks_every_section_alike() -> None:
    budget = Budget(Hand(), 6, {"a": 10, "b": 20, "c": 30})
    assert [budget.open(name).left_s for name in "abc"] == pytest.approx([1, 3, 6])


def test_time_asked_for_must_be_there() -> None:
    clock = Hand()
    deadline = Budget(clock, 10, {"a": 10}).open("a")
    deadline.check(9.9)
    with pytest.raises(OutOfTime, match=r"10\.0 s wanted"):
        deadline.check(10.0)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200))
def test_spread_lies_inside_its_values(values: list[float]) -> None:
    found = spread(values)
    assert min(values) <= found.p50 <= found.p99 <= max(values)
    assert found.count == len(values)
    assert sum(v <= found.p99 for v in values) >= 0.99 * len(values)


def test_of_nothing_there_is_no_figure() -> None:
    found = spread([])
    assert isnan(found.mean)
    assert isnan(found.p99)
    assert row("m", found.mean, "ms")["value"] is None


def test_fragmentation_is_per_cent_of_what_is_held() -> None:
    assert fragmentation(75, 100) == 25.0
    assert fragmentation(100, 100) == 0.0
    assert fragmentation(0, 0) is None


def test_rows_are_judged_by_their_goal_and_keep_claims() -> None:
    made = row("m", 9.0, "%", peer="p", peer_value=18.0, goal="<= 9.2 %", claim="S13", note="n")
    assert (made["met"], made["ratio"], made["claim"], made["note"]) == (True, 0.5, "S13", "n")
    assert row("m", 9.3, "%", goal="<= 9.2 %")["met"] is False
    skipped = row("m", None, "%", goal="<= 9.2 %", note="no such thing here")
    assert (skipped["met"], skipped["goal"]) == (None, "")
    assert failed("memory", ValueError("two\nlines"))["error"] == "ValueError: two"
    assert failed("memory", ValueError())["met"] is False


def test_work_of_attention_by_hand() -> None:
    case = AttentionCase(2, 4, heads=3, kv_heads=1, head_dim=5)
    products = 2 * 3 * 4 * 4 * 5  # multiply-adds of QK over the whole square
    assert case.flops(backward=False) == products * 2 * 2 / 2
    assert case.flops(backward=True) == 2.5 * case.flops(backward=False)
    assert case.math_bytes == 2 * 4 * 2 * 3 * 4 * 4


def test_the_cases_cover_gqa_and_mha_long_and_many() -> None:
    cases = attention_cases(tiny=False)
    assert {case.heads == case.kv_heads for case in cases} == {True, False}
    assert max(case.tokens for case in cases) >= 8192
    assert max(case.batch for case in cases) >= 16
    assert {16, 32} <= set(decode_batches(tiny=False))
    assert set(CLAIM_FRAGMENTATION) == {16, 32}


@given(batch=st.integers(1, 8), steps=st.integers(1, 200), seed=st.integers(0, 9))
def test_every_place_is_taken_for_all_steps_by_the_same_sequences_each_time(
    batch: int, steps: int, seed: int
) -> None:
    places = churn(batch, steps, 256, Random(seed).randint)
    assert places == churn(batch, steps, 256, Random(seed).randint)
    assert len(places) == batch
    for lengths in places:
        assert sum(stay(length) for length in lengths) > steps
        assert sum(stay(length) for length in lengths[:-1]) <= steps
        assert all(16 <= length <= 256 for length in lengths)


def test_a_section_that_fails_keeps_what_it_had_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(env: Any) -> Iterator[dict[str, Any]]:
        yield row("before", 1.0, "ms")
        raise OutOfTime("over")

    rows, whole = gpu.collect("decode", None, lambda name: broken)
    assert [r["metric"] for r in rows] == ["before", "decode"]
    assert (rows[-1]["error"], rows[-1]["met"], whole) == ("OutOfTime: over", False, False)
    assert "OutOfTime" in capsys.readouterr().err


def test_a_section_whose_imports_fail_is_one_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    rows, whole = gpu.collect("no_such_section", None)
    assert "ModuleNotFoundError" in rows[0]["error"]
    assert not whole


def test_a_run_cut_short_leaves_a_whole_file(tmp_path: Path) -> None:
    file = tmp_path / "new" / "rows.json"
    gpu.save(file, {"rows": [1]})
    gpu.save(file, {"rows": [1, 2]})
    assert json.loads(file.read_text()) == {"rows": [1, 2]}
    assert [p.name for p in file.parent.iterdir()] == ["rows.json"]


def test_the_table_shows_verdicts_errors_and_notes() -> None:
    text = table(
        [
            row("good", 1.0, "ms", peer="p", peer_value=2.0, goal="ratio <= 1"),
            row("bad", 3.0, "ms", goal="<= 2 ms"),
            row("none", None, "ms", note="not here"),
            failed("broken", ValueError("why")),
        ]
    ).splitlines()
    assert "ratio 0.5 | ratio <= 1: met" in text[0]
    assert "NOT MET" in text[1]
    assert "not here" in text[2]
    assert "ValueError: why" in text[3]


def script(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tests/bench/gpu.py"), *args]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # tiny tensors gain nothing by more, a busy machine loses
    return subprocess.run(
        command, capture_output=True, text=True, timeout=290, check=False, cwd="/", env=alone
    )


@pytest.mark.torch
def test_every_section_runs_on_the_cpu(tmp_path: Path) -> None:
    """The same script, in a process of its own, from another folder: what the GPU machine will be told."""
    out = tmp_path / "rows.json"
    # Seven seconds of work; with fifteen others on two processors it took 106.
    done = script("--device", "cpu", "--tiny", "--seconds", "270", "--out", str(out))
    assert done.returncode == 0, done.stderr[-3000:]
    body = json.loads(out.read_text())
    rows = {r["metric"]: r for r in body["rows"]}
    assert (body["schema_version"], body["tiny"], body["device"]) == (1, True, "cpu")
    assert [r["metric"] for r in body["rows"] if r.get("error")] == []
    for part in ("copy on the device", "SDPA flash: relative error", "forward + backward", "decode step"):
        assert any(part in metric for metric in rows), part
    for part in ("host time to launch", "allocator fragmentation", "pinned buffer", "weir load", "wake to"):
        assert any(part in metric for metric in rows), part
    for metric, it in rows.items():
        if "relative error" in metric or "answered otherwise" in metric:
            assert it["met"] is True, it
        if "allocator" in metric:
            assert it["value"] is None, it
            assert it["note"], it


@pytest.mark.torch
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert gpu.run(gpu.parser().parse_args([])) == 2
    assert "--device cpu --tiny" in capsys.readouterr().err


@pytest.mark.torch
def test_the_sections_need_nothing_but_torch_and_the_loaders_libraries() -> None:
    """The GPU machine has torch, safetensors and xxhash of what we use; the rest must not be asked for."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "banned = {'aiohttp', 'typer', 'rich', 'pydantic', 'yaml', 'consul', 'prometheus_client', 'psutil',\n"
        "          'tokenizers', 'transformers', 'jinja2', 'grpc', 'numpy'}\n"
        "class Guard:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in banned:\n"
        "            raise ModuleNotFoundError('not there: ' + name, name=name)\n"
        "sys.meta_path.insert(0, Guard())\n"
        "import warnings; warnings.simplefilter('ignore')\n"
        "import torch\n"
        "from tests.bench.gpu import SECTIONS, section_of\n"
        "[section_of(name) for name in SECTIONS]\n"
        "from services.llama import graph\n"
        "from services.weights import open_weights\n"
        "import services.weights.device\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT)], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


class Card:
    """Stands in for torch.cuda where only the figures of a card are asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        self.allocated, self.reserved, self.taken = 75, 100, 0
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device=None: None)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: self.allocated)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: self.reserved)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1000 - self.taken, 1000))
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Tick())

    def env(self) -> Any:
        import torch

        from tests.bench.gpu_env import Env

        return Env(torch.device("cuda"), False, Budget(Hand(), 60, {"a": 60}).open("a"))


class Tick:
    """An event of the device: the next one is 2 ms later."""

    made = 0.0

    def record(self) -> None:
        Tick.made += 2.0
        self.at = Tick.made

    def elapsed_time(self, end: Tick) -> float:
        return end.at - self.at


@pytest.mark.torch
def test_rows_of_fragmentation_as_a_card_would_give_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.bench import gpu_memory

    env = Card(monkeypatch).env()
    monkeypatch.setattr(gpu_memory, "make_core", lambda *args, graph: graph)
    monkeypatch.setattr(gpu_memory, "grown", lambda *args: [18.0, 20.0])
    monkeypatch.setattr(gpu_memory, "pooled", lambda env, graph, load: [9.0, 9.2] if graph else [10.0])
    load = gpu_memory.Load(16, 4, [[8]])
    plain, pool, graph = gpu_memory._of_batch(env, None, {}, load)  # type: ignore[arg-type]
    assert (plain["value"], plain["goal"]) == (19.0, "")
    assert (pool["value"], pool["peer_value"], pool["goal"]) == (10.0, 19.0, "")
    assert (graph["value"], graph["goal"], graph["met"]) == (9.1, "<= 9.2 %", True)
    monkeypatch.setattr(gpu_memory, "pooled", lambda *args: 1 / 0 if args[1] else [10.0])
    with pytest.raises(ZeroDivisionError):  # our own mistakes aren't taken for the card's
        list(gpu_memory._of_batch(env, None, {}, load))  # type: ignore[arg-type]


@pytest.mark.torch
def test_a_graph_that_cant_be_captured_costs_its_own_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.bench import gpu_memory

    def pooled(env: Any, graph: bool, load: Any) -> list[float]:
        if graph:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return [10.0]

    env = Card(monkeypatch).env()
    monkeypatch.setattr(gpu_memory, "make_core", lambda *args, graph: graph)
    monkeypatch.setattr(gpu_memory, "grown", lambda *args: [18.0])
    monkeypatch.setattr(gpu_memory, "pooled", pooled)
    rows = list(gpu_memory._of_batch(env, None, {}, gpu_memory.Load(32, 4, [[8]])))  # type: ignore[arg-type]
    assert [r["value"] for r in rows] == [18.0, 10.0, None]
    assert rows[2]["error"].endswith("capturing")


@pytest.mark.torch
def test_a_card_is_read_off_and_timed_by_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.bench.gpu_env import timed_ms
    from tests.bench.gpu_memory import _read

    card = Card(monkeypatch)
    env, readings = card.env(), []
    _read(env, readings)
    card.reserved = 0
    _read(env, readings)
    assert readings == [25.0]
    calls: list[int] = []
    assert timed_ms(env, lambda: calls.append(1), 3, warm=2) == [2.0, 2.0, 2.0]
    assert len(calls) == 5


@pytest.mark.torch
@pytest.mark.parametrize(("gives_back", "leaks", "garbles"), [(700, 0, False), (300, 1 << 27, True)])
def test_cycles_say_what_came_back_what_leaked_and_what_was_answered(
    monkeypatch: pytest.MonkeyPatch, gives_back: int, leaks: int, garbles: bool
) -> None:
    from tests.bench import gpu_wake

    card = Card(monkeypatch)
    answers = iter([1] + [2 if garbles else 1] * 9)

    class Both:
        nbytes, pool_bytes = 500, 250

        def park(self) -> None:
            card.taken -= gives_back // 2

        def unpark(self) -> None:
            card.taken += gives_back // 2 + leaks // 10

        def witness(self) -> int:
            return next(answers)

        def otherwise(self, expected: int, found: int) -> str:
            return "" if expected == found else "otherwise"

    both: Any = Both()
    env = card.env()
    monkeypatch.setattr(gpu_wake, "_copy_peer", lambda *args: {})
    found = gpu_wake.cycle(env, both, both)
    rows = {r["metric"]: r for r in gpu_wake.rows_of(env, found, 500, 1.0)}
    assert rows["given back while asleep, of weights and KV"]["met"] is (gives_back == 700)
    assert rows["leaked by all cycles"]["met"] is (leaks == 0)
    assert rows["fixed prompt answered otherwise after a wake"]["met"] is not garbles
    assert rows["wake to the first token"]["met"] is True
