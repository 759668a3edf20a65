"""The vllm engine when vLLM misbehaves: what dies is told, nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import psutil
import pytest

from regions.cli.errors import WeirError
from services.faults import EngineDied, EngineFault, EngineHung, Refused
from services.vllm import engine as vllm_engine
from services.vllm.engine import VllmEngine
from tests.contract.engine_subjects import Orders, stand_in
from tests.contract.engine_suite import answer, idle, until
from tests.contract.executor_process import executor
from tests.contract.executor_process import until as wait_until
from tests.contract.vllm_stand_in import ASK, family, started
from tests.fakes.vllm_python import fake_python
from tests.fakes.vllm_wire import ORDERS
from tests.virtual import leap, run_leaping

pytestmark = pytest.mark.real


@pytest.fixture
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Orders:
    it = Orders(tmp_path)
    monkeypatch.setenv(ORDERS, str(it.file))
    return it


# -- generating


def test_a_stream_cut_in_the_middle_is_a_fault_and_not_the_end(tmp_path: Path, orders: Orders) -> None:
    async def main() -> None:
        async with started(tmp_path) as engine:
            orders.give(cut_after=3)
            with pytest.raises(EngineFault, match="after 3 tokens") as caught:
                await answer(engine, ASK())
            assert not isinstance(caught.value, EngineDied)
            orders.give()
            assert len(await answer(engine, ASK())) == 12
            await idle(engine)

    asyncio.run(main())


@pytest.mark.parametrize(("status", "kind"), [(429, Refused), (500, EngineFault), (503, EngineFault)])
def test_what_it_answers_instead(tmp_path: Path, orders: Orders, status: int, kind: type) -> None:
    async def main() -> None:
        async with started(tmp_path) as engine:
            orders.give(status=status)
            with pytest.raises(kind) as caught:
                await answer(engine, ASK())
            if isinstance(caught.value, Refused):
                assert (caught.value.status, caught.value.retry_after_s) == (429, 7.0)
            else:
                assert str(status) in str(caught.value)

    asyncio.run(main())


def test_no_token_for_too_long_is_a_hang(tmp_path: Path, orders: Orders) -> None:
    async def main() -> None:
        async with started(tmp_path, token_s=60) as engine:
            orders.give(hang_after=2)
            made = engine.generate(ASK())
            for _ in range(2):
                await anext(made)
            leap(60)
            with pytest.raises(EngineHung, match="after 2 tokens"):
                await anext(made)
            orders.give()
            await idle(engine)

    run_leaping(main())


def test_a_queue_is_told(tmp_path: Path, orders: Orders) -> None:
    async def main() -> None:
        async with started(tmp_path, max_num_seqs=1) as engine:
            orders.give(step_ms=500)  # minutes, until it is told to be quick
            asked = [asyncio.create_task(answer(engine, ASK(max_tokens=400))) for _ in range(3)]
            await until("one runs, two wait", lambda: _load(engine) == (1, 2))
            orders.give(step_ms=0)
            assert {len(tokens) for tokens in await asyncio.gather(*asked)} == {400}
            await idle(engine)
            assert "vllm:num_requests_waiting_by_reason" in engine.upstream_metrics()

    asyncio.run(main())


def _load(engine: VllmEngine) -> tuple[int, int]:
    now = engine.stats()
    return now.running, now.waiting


# -- dying


def test_a_server_that_dies_is_dead_for_good(
    tmp_path: Path, orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Who dies is told apart from who hangs up once the leash has ended; how soon that is, is the machine's.
    monkeypatch.setattr(vllm_engine, "NOTICE_S", 60.0)

    async def main() -> None:
        async with started(tmp_path) as engine:
            before = family()
            assert len(before) >= 3, "leash, server, core"
            orders.give(die_after=2)
            with pytest.raises(EngineDied, match="ended by itself"):
                await answer(engine, ASK())
            assert engine.stats().dead
            assert engine.upstream_metrics() == ""
            await until("its core is gone too", lambda: not any(p.is_running() for p in before))
            with pytest.raises(EngineDied):
                await engine.wake()

    asyncio.run(main())


def test_an_idle_server_that_is_killed_is_noticed(tmp_path: Path, orders: Orders) -> None:
    async def main() -> None:
        async with started(tmp_path) as engine:
            [server] = [
                p
                for p in family()
                if "--served-model-name" in p.cmdline()
                and p.children()
                and "leash.py" not in " ".join(p.cmdline())
            ]
            server.kill()
            await until("it is dead", lambda: bool(engine.stats().dead))

    asyncio.run(main())


def test_a_killed_leash_leaves_no_server(tmp_path: Path, orders: Orders) -> None:
    async def main() -> None:
        async with started(tmp_path) as engine:
            [leash] = [p for p in family() if p.ppid() == os.getpid()]
            server = leash.children()[0]
            leash.kill()
            await until("it is dead", lambda: bool(engine.stats().dead))
            await until("the server is gone", lambda: not server.is_running())
            _end_orphans(tmp_path)

    asyncio.run(main())


def _end_orphans(folder: Path) -> None:
    """The stand-in's core left its group on purpose; only the leash could have found it."""
    for process in psutil.process_iter(["cmdline", "ppid"]):
        if "time.sleep(3600)" in " ".join(process.info["cmdline"] or ()) and process.info["ppid"] == 1:
            with contextlib.suppress(psutil.Error):
                if str(folder) in process.environ().get(ORDERS, ""):
                    process.kill()


def test_a_start_that_fails_says_the_end_of_the_log(tmp_path: Path, orders: Orders) -> None:
    orders.give(exit=3)

    async def main() -> None:
        with pytest.raises(WeirError, match="ended while it started"):
            async with started(tmp_path, args="--no-such-flag"):
                pass
        assert not family()

    asyncio.run(main())


def test_a_start_takes_no_longer_than_it_may(tmp_path: Path, orders: Orders) -> None:
    orders.give(late_s=60)

    async def main() -> None:
        with pytest.raises(WeirError, match="not healthy after 1 s"):
            async with started(tmp_path, start_s=1):
                pass
        assert not family()

    asyncio.run(main())


def test_a_start_that_is_cancelled_leaves_nothing(tmp_path: Path, orders: Orders) -> None:
    orders.give(late_s=60)

    async def main() -> None:
        engine = stand_in(tmp_path)
        starting = asyncio.create_task(engine.start())
        await until("the server is there", lambda: len(family()) >= 3)
        starting.cancel()
        await asyncio.wait((starting,))
        assert not family()
        await engine.close()

    asyncio.run(main())


def test_a_python_without_vllm_is_named(tmp_path: Path, orders: Orders) -> None:
    async def main() -> None:
        with pytest.raises(WeirError, match="can't be asked"):
            await stand_in(tmp_path, python=tmp_path / "nothing").start()

    asyncio.run(main())


# -- the whole process


def _options(folder: Path, orders: Orders) -> tuple[str, ...]:
    python = fake_python(folder, cuda=None)
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return (
        *("--engine", "vllm", "--model", str(model), "--option", f"python={python}"),
        *("--option", f"log={folder / 'vllm.log'}", "--option", "metrics_s=0.1"),
    )


def test_sigkill_of_the_executor_leaves_nothing(tmp_path: Path, orders: Orders) -> None:
    with executor(tmp_path, "127.107.6.11", *_options(tmp_path, orders)) as it:
        below = psutil.Process(it.process.pid).children(recursive=True)
        assert len(below) >= 3
        it.signal(signal.SIGKILL)
        it.ended()
        wait_until("nothing is left", lambda: not any(p.is_running() for p in below))


def test_sigkill_of_a_frozen_executor_leaves_nothing(tmp_path: Path, orders: Orders) -> None:
    """As a region frozen and then killed: a stopped group whose parent died gets SIGHUP from the kernel."""
    with executor(tmp_path, "127.107.6.15", *_options(tmp_path, orders)) as it:
        below = psutil.Process(it.process.pid).children(recursive=True)
        for process in (psutil.Process(it.process.pid), *below):
            process.suspend()
        it.signal(signal.SIGKILL)
        it.ended()
        try:
            wait_until("nothing is left", lambda: not any(p.is_running() for p in below))
        finally:
            for process in below:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


def test_sigterm_lets_streams_end_and_then_stops_the_server(tmp_path: Path, orders: Orders) -> None:
    orders.give(step_ms=10)
    patient = ("--drain-deadline-s", "600")
    with executor(tmp_path, "127.107.6.12", *_options(tmp_path, orders), *patient) as it:
        below = psutil.Process(it.process.pid).children(recursive=True)
        stream = it.stream(model="model", max_tokens=60, ignore_eos=True)
        stream.take(2)
        it.signal(signal.SIGTERM)
        assert stream.rest().endswith(b"data: [DONE]\n\n")
        assert it.ended() == 0
        wait_until("nothing is left", lambda: not any(p.is_running() for p in below))


def test_sigterm_while_it_starts_stops_it(tmp_path: Path, orders: Orders) -> None:
    orders.give(late_s=60)
    with executor(tmp_path, "127.107.6.13", *_options(tmp_path, orders), wait=False) as it:
        process = psutil.Process(it.process.pid)
        wait_until("the server is there", lambda: len(process.children(recursive=True)) >= 3)
        below = process.children(recursive=True)
        it.signal(signal.SIGTERM)
        assert it.ended() == 0
        wait_until("nothing is left", lambda: not any(p.is_running() for p in below))


def test_the_dead_engine_is_told_by_health(tmp_path: Path, orders: Orders) -> None:
    ill = ("--set", "pool.heal_first_s=300")  # it isn't healed before it was looked at
    with executor(tmp_path, "127.107.6.14", *_options(tmp_path, orders), *ill) as it:
        leash = psutil.Process(it.process.pid).children()[0]
        os.kill(leash.children()[0].pid, signal.SIGKILL)
        wait_until("/health says so", lambda: it.get("/health") == 503)
        assert it.get("/ready") == 503
