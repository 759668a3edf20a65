"""The Consul room on one real agent: KV, transactions, locks, registration, CA, faults under a watch."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from mesh.clock import SystemClock
from mesh.consul import decode, lock, register
from mesh.consul.answers import KvEntry, TxnOp
from mesh.consul.client import Consul
from mesh.consul.errors import BadRequest
from mesh.consul.watch import Watch
from mesh.model import Endpoint, Health, Proxy, ProxyKind
from regions.cli.errors import Refused
from tests.contract.consul_agent import Agent, consul_agent

pytestmark = pytest.mark.real
IP, EXECUTOR = "127.102.1.1", "127.102.1.11"


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    with consul_agent(tmp_path_factory.mktemp("consul"), IP, "us-east-1") as running:
        yield running


def on(agent: Agent, scene: Callable[[Consul], Awaitable[None]]) -> None:
    async def main() -> None:
        async with Consul(agent.http, agent.token) as consul:
            await scene(consul)

    asyncio.run(main())


async def until(what: str, holds: Callable[[], Any], within_s: float = 150.0) -> None:
    """Poll with a deadline: longer than the minute after which Consul itself looks again at all."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        await asyncio.sleep(0.01)


class Heard:
    """A running watch and what it told."""

    def __init__(self, watch: Watch[Any], values: list[Any]) -> None:
        self.watch, self.values = watch, values


@asynccontextmanager
async def watching(fetch: Callable[[int, float], Awaitable[tuple[int, Any]]], wait_s: float = 55) -> Any:
    values: list[Any] = []
    watch = Watch(
        "w",
        fetch,
        lambda value, _: values.append(value),
        clock=SystemClock(),
        rng=random.Random(5),
        wait_s=wait_s,
    )
    task = asyncio.create_task(watch.run())
    try:
        await until("first answer", lambda: watch.wakeups > 0)
        yield Heard(watch, values)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def kv_fetch(consul: Consul, prefix: str) -> Callable[[int, float], Awaitable[tuple[int, dict[str, bytes]]]]:
    async def fetch(index: int, wait_s: float) -> tuple[int, dict[str, bytes]]:
        page = await consul.kv_list(prefix, None, index, wait_s)
        return page.index, {entry.key: entry.value for entry in page.entries}

    return fetch


def test_kv_values_cas_and_prefixes(agent: Agent) -> None:
    async def scene(consul: Consul) -> None:
        assert await consul.kv_get("a/none") is None
        empty = await consul.kv_list("a/none/")
        assert empty.entries == ()
        assert empty.index > 0
        for value in (b"", b"0.15", bytes(range(256)), "ünï".encode()):
            assert await consul.kv_put("a/x y", value)
            entry = await consul.kv_get("a/x y")
            assert entry is not None
            assert entry.value == value
        assert entry is not None
        assert not await consul.kv_put("a/x y", b"other", cas=1)
        assert await consul.kv_put("a/x y", b"other", cas=entry.modify_index)
        assert not await consul.kv_put("a/x y", b"again", cas=0)
        assert await consul.kv_put("a/z", b"", cas=0)
        assert [e.key for e in (await consul.kv_list("a/")).entries] == ["a/x y", "a/z"]
        assert not await consul.kv_delete("a/z", cas=1)
        assert await consul.kv_delete("a/", recurse=True)
        assert (await consul.kv_list("a/")).entries == ()

    on(agent, scene)


def test_consul_itself_refuses_600_kb_and_so_do_we(agent: Agent) -> None:
    async def scene(consul: Consul) -> None:
        big = b"x" * 600_000
        with pytest.raises(BadRequest, match="600000 bytes"):
            await consul.kv_put("big", big)
        with pytest.raises(BadRequest) as caught:
            await consul.exchange("PUT", "/v1/kv/big", data=big, accept=(200,))
        assert caught.value.status == 413
        assert await consul.kv_put("big", b"x" * 512 * 1024)
        assert await consul.kv_delete("big")

    on(agent, scene)


def test_a_transaction_is_all_or_nothing(agent: Agent) -> None:
    async def scene(consul: Consul) -> None:
        assert (await consul.txn([TxnOp.put("t/a", b"1"), TxnOp.cas("t/b", b"2", 0)])).ok
        entry = await consul.kv_get("t/a")
        assert entry is not None
        refused = await consul.txn(
            [TxnOp.put("t/b", b"9"), TxnOp.check_index("t/a", entry.modify_index + 1), TxnOp.delete("t/a")]
        )
        assert not refused.ok
        assert [error.op for error in refused.errors] == [1]
        assert "t/a" in refused.errors[0].why
        b = await consul.kv_get("t/b")
        assert b is not None
        assert b.value == b"2"
        assert not (await consul.txn([TxnOp.check_not_exists("t/a"), TxnOp.put("t/a", b"3")])).ok
        assert (
            await consul.txn(
                [TxnOp.check_index("t/a", entry.modify_index), TxnOp.delete_cas("t/b", b.modify_index)]
            )
        ).ok
        assert await consul.kv_get("t/b") is None

    on(agent, scene)


def test_who_we_talk_to(agent: Agent) -> None:
    async def scene(consul: Consul) -> None:
        info = await consul.self_info()
        assert info.datacenter == "us-east-1"
        assert info.server
        assert info.version_tuple >= (1, 8)

    on(agent, scene)


def test_one_lock_one_holder_and_the_fence_outlives_it(agent: Agent) -> None:
    async def scene(consul: Consul) -> None:
        async with lock.hold(consul, "locks/drill", {"who": "anna", "why": "region-loss"}) as held:
            assert (await consul.txn([held.guard(), TxnOp.put("l/written", b"by anna")])).ok
            with pytest.raises(Refused, match="who anna"):
                async with lock.hold(consul, "locks/drill", {"who": "ben"}):
                    raise AssertionError("two holders")
            assert await lock.who_holds(consul, "locks/drill") == {"who": "anna", "why": "region-loss"}
        assert await lock.who_holds(consul, "locks/drill") is None
        async with lock.hold(consul, "locks/drill", {"who": "ben"}) as second:
            assert second.lock_index == held.lock_index + 1
            assert not (await consul.txn([held.guard(), TxnOp.put("l/written", b"late anna")])).ok
        with pytest.raises(ZeroDivisionError):
            async with lock.hold(consul, "locks/drill", {"who": "carl"}):
                raise ZeroDivisionError
        assert await lock.who_holds(consul, "locks/drill") is None
        sessions = (await consul.get("/v1/session/list")).body
        assert sessions == [], "a session was left behind"

    on(agent, scene)


def test_a_holder_whose_session_dies_is_told(agent: Agent) -> None:
    async def scene(consul: Consul) -> None:
        async with lock.hold(consul, "locks/x", {"who": "anna"}) as held:
            await consul.session_destroy(held.session)
            # ttl/3 until the next renewal.
            async with asyncio.timeout(60):
                await held.lost.wait()
            async with lock.hold(consul, "locks/x", {"who": "ben"}):
                assert not (await consul.txn([held.guard(), TxnOp.put("l/x", b"")])).ok

    on(agent, scene)


def test_a_cancelled_holder_lets_go_at_once(agent: Agent) -> None:
    async def scene(consul: Consul) -> None:
        inside = asyncio.Event()

        async def work() -> None:
            async with lock.hold(consul, "locks/y", {"who": "anna"}):
                inside.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await inside.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await lock.who_holds(consul, "locks/y") is None

    on(agent, scene)


IT = register.Instance(
    service="chat",
    id="chat-stable-0",
    region="us-east-1",
    zone="us-east-1a",
    stage="stable",
    version="v1",
    model="echo",
    tenant_class="all",
    address=EXECUTOR,
    port=9000,
    xds_token_sha256="ab" * 32,
)


def unhurried(it: register.Instance) -> dict[str, Any]:
    """Its registration, with a check that takes no pause of this process for a failure."""
    body = register.instance(it)
    body["Checks"][0]["Timeout"] = "60s"
    return body


@asynccontextmanager
async def executor(status: list[int]) -> Any:
    async def health(_: web.Request) -> web.Response:
        return web.Response(status=status[0])

    app = web.Application()
    app.router.add_get("/health", health)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, EXECUTOR, 9000).start()
        yield
    finally:
        await runner.cleanup()


def endpoint_fetch(consul: Consul) -> Callable[[int, float], Awaitable[tuple[int, tuple[Endpoint, ...]]]]:
    async def fetch(index: int, wait_s: float) -> tuple[int, tuple[Endpoint, ...]]:
        answer = await consul.get("/v1/health/connect/chat", {}, index, wait_s)
        found, problems = decode.endpoints(answer.body, "chat", "us-east-1")
        assert problems == ()
        return answer.index, found

    return fetch


def test_the_life_of_an_instance_as_the_mesh_sees_it(agent: Agent) -> None:
    async def scene(consul: Consul) -> None:
        status = [200]
        async with executor(status), watching(endpoint_fetch(consul)) as heard:

            def shown() -> list[Health]:
                return [end.health for end in heard.values[-1]]

            await consul.register(unhurried(IT))
            await until("registered", lambda: shown() == [Health.PASSING])
            status[0] = 503
            await until("failed check", lambda: shown() == [Health.CRITICAL])
            status[0] = 200
            await until("well again", lambda: shown() == [Health.PASSING])
            await consul.register(unhurried(replace(IT, lifecycle="draining")))
            await until("draining", lambda: shown() == [Health.DRAINING])
            told = len(heard.values)
            await consul.register(unhurried(replace(IT, lifecycle="draining")))
            await consul.deregister(IT.id)
            await until("gone", lambda: shown() == [])
            # On the way out Consul may show the sidecar alone for a moment: its alias has lost its service.
            later = [[end.health for end in value] for value in heard.values[told:]]
            assert later in ([[]], [[Health.CRITICAL], []]), "registering the same again is no news"
            assert await consul.services() == {}, "the sidecar stayed behind"

    on(agent, scene)


def test_proxies_of_this_datacenter_come_from_three_wide_reads(agent: Agent) -> None:
    async def scene(consul: Consul) -> None:
        await consul.register(register.instance(IT))
        await consul.register(register.ingress("us-east-1", "127.102.1.3", 8443, "cd" * 32))
        await consul.register(register.mesh_gateway("us-east-1", "127.102.1.4", 8443, "ef" * 32))
        found: dict[str, Proxy] = {}
        for path in ("connect/chat", "service/ingress-gateway", "service/mesh-gateway"):
            proxies, problems = decode.proxies((await consul.get(f"/v1/health/{path}")).body)
            assert problems == ()
            found |= {proxy.id: proxy for proxy in proxies}
        assert {p.id: (p.kind, p.service) for p in found.values()} == {
            "chat-stable-0-sidecar-proxy": (ProxyKind.SIDECAR, "chat"),
            "us-east-1-ingress": (ProxyKind.INGRESS, "ingress-gateway"),
            "us-east-1-mesh-gateway": (ProxyKind.MESH_GATEWAY, "mesh-gateway"),
        }
        side = found["chat-stable-0-sidecar-proxy"]
        assert (side.address, side.port, side.local_address, side.local_port) == (
            EXECUTOR,
            21000,
            EXECUTOR,
            9000,
        )
        assert side.token_sha256 == "ab" * 32
        for name in ("chat-stable-0", "us-east-1-ingress", "us-east-1-mesh-gateway"):
            await consul.deregister(name)

    on(agent, scene)


def test_leaf_and_roots_block_on_their_index(agent: Agent) -> None:
    async def scene(consul: Consul) -> None:
        index, leaf = await consul.leaf("chat")
        _, roots = await consul.roots()
        assert leaf.uri == f"spiffe://{roots.trust_domain}/ns/default/dc/us-east-1/svc/chat"
        assert index > 0
        started = time.monotonic()
        again, same = await consul.leaf("chat", index, 0.5)
        assert same.serial == leaf.serial
        assert again == index
        assert time.monotonic() - started >= 0.5, "did not block"

    on(agent, scene)


def test_a_watch_survives_its_agent_and_tells_only_news(tmp_path: Path) -> None:
    with consul_agent(tmp_path, "127.102.2.1", "dc") as agent:

        async def scene(consul: Consul) -> None:
            await consul.kv_put("config/traffic/canary-weight", b"0.1")
            async with watching(kv_fetch(consul, "config/traffic/")) as heard:
                watch = heard.watch
                agent.kill()
                await until("the error shows", lambda: watch.error)
                before = watch.wakeups
                agent.start()
                await until("answers again", lambda: watch.wakeups > before and watch.error is None)
                assert len(heard.values) == 1, "equal content is no news"
                await asyncio.to_thread(agent.wait_ready)
                await consul.kv_put("config/traffic/canary-weight", b"0.2")
                await until("news", lambda: len(heard.values) == 2)
                assert heard.values[-1] == {"config/traffic/canary-weight": b"0.2"}

        on(agent, scene)


def test_a_snapshot_restore_turns_the_index_back_and_the_watch_follows(tmp_path: Path) -> None:
    with consul_agent(tmp_path, "127.102.3.1", "dc") as agent:

        async def scene(consul: Consul) -> None:
            await consul.kv_put("config/a", b"old")
            snapshot = agent.call("GET", "/v1/snapshot")
            for number in range(30):
                await consul.kv_put("config/a", b"new %d" % number)
            async with watching(kv_fetch(consul, "config/")) as heard:
                high = heard.watch.index
                await asyncio.to_thread(agent.call, "PUT", "/v1/snapshot", snapshot, 20)
                await until("old value told", lambda: heard.values[-1] == {"config/a": b"old"})
                await until("asked from the lower index", lambda: 0 < heard.watch.index < high)
                await consul.kv_put("config/a", b"after")
                await until("and goes on", lambda: heard.values[-1] == {"config/a": b"after"})

        on(agent, scene)


def test_a_wiped_prefix_is_an_empty_page_not_an_error(agent: Agent) -> None:
    async def scene(consul: Consul) -> None:
        await consul.kv_put("w/a", b"1")
        async with watching(kv_fetch(consul, "w/")) as heard:
            await consul.kv_delete("w/", recurse=True)
            await until("empty", lambda: heard.values[-1] == {})
            assert heard.watch.error is None
            await consul.kv_put("w/b", b"2")
            await until("back", lambda: heard.values[-1] == {"w/b": b"2"})

    on(agent, scene)


def test_writing_what_is_there_already_changes_no_index(agent: Agent) -> None:
    """A compare-and-set with equal content succeeds and leaves the index: two such writers both "win"."""

    async def scene(consul: Consul) -> None:
        await consul.kv_put("same", b"1")
        before = await consul.kv_get("same")
        assert before is not None
        assert await consul.kv_put("same", b"1", cas=before.modify_index)
        assert await consul.kv_put("same", b"1")
        assert await consul.kv_get("same") == before

    on(agent, scene)


def test_two_writers_at_once_one_wins(agent: Agent) -> None:
    async def scene(consul: Consul) -> None:
        await consul.kv_put("race", b"base")
        entry = await consul.kv_get("race")
        assert isinstance(entry, KvEntry)
        won = await asyncio.gather(
            *(consul.kv_put("race", b"%d" % n, cas=entry.modify_index) for n in range(8))
        )
        assert won.count(True) == 1
        now = await consul.kv_get("race")
        assert now is not None
        assert now.value == b"%d" % won.index(True)

    on(agent, scene)


def test_watches_over_the_agents_connection_limit_wait_their_turn(tmp_path: Path) -> None:
    limits = {"limits": {"http_max_conns_per_client": 4}}
    with consul_agent(tmp_path, "127.102.4.1", "dc", extra=limits) as agent:

        async def scene(consul: Consul) -> None:
            watches = [
                Watch(
                    f"w{n}",
                    kv_fetch(consul, f"p{n}/"),
                    lambda value, _: None,
                    clock=SystemClock(),
                    rng=random.Random(n),
                    # The agent notices that we hung up only when the wait is over: until then the
                    # connection counts.
                    wait_s=2.0,
                )
                for n in range(8)
            ]
            tasks = [asyncio.create_task(watch.run()) for watch in watches]
            try:
                await until("some are refused", lambda: any(w.error for w in watches))
                await until("half are served", lambda: sum(w.index > 0 for w in watches) >= 4)
                first = [w for w in watches if w.index > 0][:4]
                for watch, task in zip(watches, tasks, strict=True):
                    if watch in first:
                        task.cancel()
                rest = [w for w in watches if w not in first]
                await until("the others get in", lambda: all(w.index > 0 and not w.error for w in rest))
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        on(agent, scene)
