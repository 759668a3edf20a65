"""The ADS server over real gRPC: admission, thieves, slow clients, storms, doors.

Law: each test has its own socket in its own folder and its own server; nothing outlives it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import stat
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from envoy.service.discovery.v3 import discovery_pb2
from envoy.service.load_stats.v3 import lrs_pb2
from prometheus_client import CollectorRegistry

from mesh.clock import SystemClock
from mesh.model import Proxy, ProxyKind
from mesh.xds import lrs, names, stream
from mesh.xds.auth import authenticator
from mesh.xds.lrs import LoadSample
from mesh.xds.server import SERVICE, AdsServer, Limits, Tcp
from regions.cli.errors import WeirError
from tests.fakes.envoy import FakeEnvoy, wanted
from tests.fakes.envoy_grpc import DELTA, connected, until
from tests.fakes.sets import simple

A, B = "chat.cn-north-1.stable", "chat.cn-north-1.canary"


def token(proxy_id: str) -> str:
    return f"token-of-{proxy_id}"


class World:
    """A server and its registrations."""

    def __init__(self, folder: Path, **how: Any) -> None:
        self.path = folder / "weir" / "ads.sock"
        self.target = f"unix:{self.path}"
        self.proxies: dict[str, Proxy] = {}
        self.registry = CollectorRegistry()
        self.server = AdsServer(
            str(self.path),
            clock=SystemClock(),
            rng=random.Random(1),
            authenticate=authenticator(lambda: self.proxies),
            metrics=self.registry,
            **how,
        )

    def register(self, proxy_id: str) -> None:
        digest = hashlib.sha256(token(proxy_id).encode()).hexdigest()
        self.proxies[proxy_id] = Proxy(
            proxy_id, ProxyKind.INGRESS, "ingress-gateway", "127.104.1.3", 8080, digest
        )

    def value(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    def applied(self, *proxy_ids: str) -> bool:
        states = self.server.proxies()
        return all(i in states and all(state.applied for state in states[i]) for i in proxy_ids)


@asynccontextmanager
async def world(folder: Path, *proxies: str, **how: Any) -> AsyncIterator[World]:
    made = World(folder, **how)
    for proxy_id in proxies:
        made.register(proxy_id)
    await made.server.start()
    try:
        yield made
    finally:
        await made.server.stop()


def drive(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 100))


async def refused(made: World, node: str, secret: str) -> tuple[grpc.StatusCode, str]:
    """What a client that must not be served is told; fails if it gets as much as one message.

    One request, for what is most precious: a second one would race with the answer to the first.
    """
    async with grpc.aio.insecure_channel(made.target) as channel:
        metadata = ((names.TOKEN_METADATA, secret),) if secret else None
        call = channel.stream_stream(DELTA)(metadata=metadata)
        request = discovery_pb2.DeltaDiscoveryRequest(
            type_url=names.SECRET, resource_names_subscribe=["leaf"]
        )
        request.node.id = node
        await call.write(request.SerializeToString())
        with pytest.raises(grpc.aio.AioRpcError):
            assert await call.read() is grpc.aio.EOF, "got a message of somebody else's configuration"
        return await call.code(), str(await call.details())


def test_a_proxy_gets_its_set_and_a_change_and_is_seen_to_have_it(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(tmp_path, "a") as made:
            changes: list[bool] = []
            made.server.on_change = lambda: changes.append(made.applied("a"))
            made.server.publish({"a": simple({A: 9_000, B: 1_000})})
            async with connected(made.target, FakeEnvoy("a"), token("a")) as envoy:
                await until("first set applied", lambda: made.applied("a"))
                desired = simple({A: 5_000, B: 5_000})
                changes.clear()
                made.server.publish({"a": desired})
                await until("change applied", lambda: envoy.fake.versions() == wanted(desired))
                await until("on_change told so", lambda: bool(changes) and changes[-1])
                assert made.value("weir_xds_streams") == 1
                assert made.value("weir_xds_pushes_total", type="RouteConfiguration") == 2
                assert made.value("weir_xds_acks_total", type="RouteConfiguration") == 2
            await until("gone", lambda: not made.server.proxies())
            assert made.value("weir_xds_streams") == 0

    drive(test)


def test_a_set_published_after_the_proxy_came_reaches_it(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(tmp_path, "a") as made, connected(made.target, FakeEnvoy("a"), token("a")):
            await until("connected", lambda: "a" in made.server.proxies())
            made.server.publish({"a": simple({A: 10_000})})
            await until("applied", lambda: made.applied("a"))

    drive(test)


@pytest.mark.parametrize(
    ("node", "secret", "code"),
    [
        ("a", "", grpc.StatusCode.UNAUTHENTICATED),
        ("a", "guess", grpc.StatusCode.UNAUTHENTICATED),
        ("a", token("b"), grpc.StatusCode.PERMISSION_DENIED),
        ("ghost", token("b"), grpc.StatusCode.PERMISSION_DENIED),
        ("ghost", "guess", grpc.StatusCode.UNAVAILABLE),
    ],
)
def test_a_thief_gets_nothing_and_is_counted(
    tmp_path: Path, node: str, secret: str, code: grpc.StatusCode
) -> None:
    async def test() -> None:
        async with world(tmp_path, "a", "b") as made:
            made.server.publish({"a": simple({A: 10_000}), "b": simple({B: 10_000})})
            got, words = await refused(made, node, secret)
            assert got is code
            assert "token-of" not in words
            failures = sum(
                sample.value
                for metric in made.registry.collect()
                for sample in metric.samples
                if sample.name == "weir_xds_auth_failures_total"
            )
            assert failures == 1
            assert made.server.proxies() == {}

    drive(test)


def test_a_proxy_not_registered_yet_may_come_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(tmp_path) as made:
            made.server.publish({"a": simple({A: 10_000})})
            assert (await refused(made, "a", token("a")))[0] is grpc.StatusCode.UNAVAILABLE
            made.register("a")
            async with connected(made.target, FakeEnvoy("a"), token("a")):
                await until("applied", lambda: made.applied("a"))

    drive(test)


def test_a_slow_client_delays_nobody_and_gets_only_the_latest(tmp_path: Path) -> None:
    async def test() -> None:
        ids = [f"p{n}" for n in range(20)]
        async with world(tmp_path, *ids) as made, AsyncExitStack() as stack:
            made.server.publish(dict.fromkeys(ids, simple({A: 9_000, B: 1_000})))
            envoys = [
                await stack.enter_async_context(connected(made.target, FakeEnvoy(i), token(i))) for i in ids
            ]
            await until("all in", lambda: made.applied(*ids))
            slow = envoys[0]
            slow.deaf.clear()
            seen = sum(1 for kind, _, _ in slow.fake.received if kind == names.ROUTE)
            for weight in range(1_001, 1_031):
                desired = simple({A: 10_000 - weight, B: weight})
                made.server.publish(dict.fromkeys(ids, desired))
                await until("the others", lambda: made.applied(*ids[1:]))
            assert not made.applied("p0")
            slow.deaf.set()
            await until("the slow one too", lambda: made.applied("p0"))
            assert slow.fake.versions() == wanted(desired)
            assert sum(1 for kind, _, _ in slow.fake.received if kind == names.ROUTE) == seen + 2

    drive(test)


def test_a_reconnect_storm_is_served(tmp_path: Path) -> None:
    async def test() -> None:
        ids = [f"p{n}" for n in range(200)]
        async with world(tmp_path, *ids) as made:
            desired = simple({A: 9_000, B: 1_000})
            made.server.publish(dict.fromkeys(ids, desired))
            fakes = [FakeEnvoy(i) for i in ids]
            for _round in range(2):
                async with AsyncExitStack() as stack:
                    for fake in fakes:
                        await stack.enter_async_context(connected(made.target, fake, token(fake.node_id)))
                    await until("all in", lambda: made.applied(*ids))
                await until("all out", lambda: not made.server.proxies())
                assert all(fake.versions() == wanted(desired) for fake in fakes)

    drive(test)


def test_a_nack_is_reported_and_the_last_good_stays(tmp_path: Path) -> None:
    async def test() -> None:
        good, bad = simple({A: 9_000, B: 1_000}), simple({A: 1_000, B: 9_000})
        version = bad.of(names.ROUTE)["ingress"].version
        fake = FakeEnvoy("a", lambda _t, _n, v: "too bad" if v == version else None)
        async with world(tmp_path, "a") as made, connected(made.target, fake, token("a")):
            made.server.publish({"a": good})
            await until("good", lambda: made.applied("a"))
            made.server.publish({"a": bad})
            await until("nack", lambda: made.value("weir_xds_nacks_total", type="RouteConfiguration") == 1)
            (state,) = made.server.proxies()["a"]
            assert "too bad" in (state.alarm or "")
            assert fake.versions() == wanted(good)

    drive(test)


def test_state_of_the_world_is_refused_with_the_way_out(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(tmp_path) as made, grpc.aio.insecure_channel(made.target) as channel:
            call = channel.stream_stream(f"/{SERVICE}/StreamAggregatedResources")()
            assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
            assert "DELTA_GRPC" in await call.details()

    drive(test)


def test_garbage_silence_and_too_many_streams_are_ended(tmp_path: Path) -> None:
    async def test() -> None:
        limits = Limits(first_within_s=0.2)
        async with (
            world(tmp_path, "a", limits=limits) as made,
            grpc.aio.insecure_channel(made.target) as channel,
        ):
            silent = channel.stream_stream(DELTA)()
            assert await silent.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        async with world(tmp_path, "a", "b", limits=Limits(streams=1)) as made:
            async with grpc.aio.insecure_channel(made.target) as channel:
                garbage = channel.stream_stream(DELTA)()
                await garbage.write(b"\xff\xff\xff")
                assert await garbage.code() is grpc.StatusCode.INVALID_ARGUMENT
            async with connected(made.target, FakeEnvoy("a"), token("a")):
                await until("in", lambda: "a" in made.server.proxies())
                assert (await refused(made, "b", token("b")))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED

    drive(test)


def test_a_stream_without_cds_is_closed_so_that_envoy_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """envoy#34334: stream up, CDS never asked for."""
    monkeypatch.setattr(stream, "CDS_WITHIN_S", 0.2)

    async def test() -> None:
        async with world(tmp_path, "a") as made, grpc.aio.insecure_channel(made.target) as channel:
            made.server.publish({"a": simple({A: 10_000})})
            call = channel.stream_stream(DELTA)(metadata=((names.TOKEN_METADATA, token("a")),))
            request = discovery_pb2.DeltaDiscoveryRequest(
                type_url=names.ENDPOINT, resource_names_subscribe=[A]
            )
            request.node.id = "a"
            await call.write(request.SerializeToString())
            assert await call.read() is not grpc.aio.EOF
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
            assert "34334" in await call.details()

    drive(test)


def test_old_streams_of_a_proxy_make_room_for_new_ones(tmp_path: Path) -> None:
    async def test() -> None:
        limits = Limits(streams_per_proxy=2)
        async with world(tmp_path, "a", limits=limits) as made, AsyncExitStack() as stack:
            made.server.publish({"a": simple({A: 10_000})})
            envoys = [
                await stack.enter_async_context(connected(made.target, FakeEnvoy("a"), token("a")))
                for _ in range(3)
            ]
            await until("one is closed", lambda: any(e.call.done() for e in envoys))
            await until("two are left", lambda: len(made.server.proxies()["a"]) == 2 and made.applied("a"))

    drive(test)


def test_streams_that_are_closed_during_their_first_message_end_for_the_client_too(tmp_path: Path) -> None:
    """Else it would wait on one for ever, with what it has, and never come again."""

    async def ended(call: Any) -> bool:
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
        return await call.code() is grpc.StatusCode.UNAVAILABLE and "replaced" in await call.details()

    async def test() -> None:
        async with (
            world(tmp_path, "a", limits=Limits(streams_per_proxy=1)) as made,
            grpc.aio.insecure_channel(made.target) as channel,
        ):
            made.server.publish({"a": simple({A: 10_000})})
            first = discovery_pb2.DeltaDiscoveryRequest(type_url=names.CLUSTER)
            first.node.id = "a"
            metadata = ((names.TOKEN_METADATA, token("a")),)
            # At once, so that each comes while the one before gets its first message.
            calls = [channel.stream_stream(DELTA)(metadata=metadata) for _ in range(50)]
            await asyncio.gather(*(call.write(first.SerializeToString()) for call in calls))
            ends = [asyncio.create_task(ended(call)) for call in calls]
            await until(
                "all but the last have ended", lambda: sum(end.done() for end in ends) == len(ends) - 1
            )
            calls[next(i for i, end in enumerate(ends) if not end.done())].cancel()
            told = await asyncio.gather(*ends, return_exceptions=True)
            assert [
                end for end in told if end is not True and not isinstance(end, asyncio.CancelledError)
            ] == []

    drive(test)


def test_the_socket_is_private_and_belongs_to_one_server(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(tmp_path) as made:
            assert stat.S_IMODE(made.path.stat().st_mode) == 0o600
            assert stat.S_IMODE(made.path.parent.stat().st_mode) == 0o700
            with pytest.raises(WeirError, match="another control plane"):
                await World(tmp_path).server.start()
        assert not made.path.exists()
        made.path.touch()  # what a crash leaves behind
        async with world(tmp_path):
            pass
        made.path.parent.chmod(0o755)
        with pytest.raises(WeirError, match="others may enter"):
            await World(tmp_path).server.start()

    drive(test)


def test_load_reports_reach_the_owner_only_from_proxies(tmp_path: Path) -> None:
    async def test() -> None:
        got: list[tuple[str, list[LoadSample]]] = []
        async with world(tmp_path, "a") as made, grpc.aio.insecure_channel(made.target) as channel:
            made.server.on_load = lambda proxy_id, samples: got.append((proxy_id, samples))
            report = lrs_pb2.LoadStatsRequest()
            report.node.id = "a"
            stats = report.cluster_stats.add(cluster_name=A).upstream_locality_stats.add(
                total_issued_requests=7
            )
            stats.locality.region, stats.locality.sub_zone = "cn-north-1", "stable"
            method = f"/{lrs.SERVICE}/StreamLoadStats"
            thief = channel.stream_stream(method)(metadata=((names.TOKEN_METADATA, "guess"),))
            await thief.write(report.SerializeToString())
            assert await thief.code() is grpc.StatusCode.UNAUTHENTICATED
            call = channel.stream_stream(method)(metadata=((names.TOKEN_METADATA, token("a")),))
            await call.write(report.SerializeToString())
            answer = lrs_pb2.LoadStatsResponse.FromString(await call.read())
            assert answer.send_all_clusters
            await until("report", lambda: got == [("a", [LoadSample("chat", "cn-north-1", "stable", 7, 0)])])
            call.cancel()

    drive(test)


def test_the_tcp_door_wants_a_client_certificate(tmp_path: Path) -> None:
    async def test() -> None:
        ca = trustme.CA()
        mine, client = ca.issue_cert("127.104.0.1"), ca.issue_cert("proxy.test")
        roots = ca.cert_pem.bytes()
        chain = mine.cert_chain_pems[0].bytes()
        credentials = grpc.ssl_server_credentials(
            [(mine.private_key_pem.bytes(), chain)], root_certificates=roots, require_client_auth=True
        )
        tcp = Tcp("127.104.0.1:18502", credentials)
        async with world(tmp_path, "a", tcp=tcp) as made:
            made.server.publish({"a": simple({A: 10_000})})
            right = grpc.ssl_channel_credentials(
                roots, client.private_key_pem.bytes(), client.cert_chain_pems[0].bytes()
            )
            async with connected(tcp.address, FakeEnvoy("a"), token("a"), right):
                await until("applied", lambda: made.applied("a"))
            wrong = grpc.ssl_channel_credentials(roots)
            async with grpc.aio.secure_channel(tcp.address, wrong) as stranger:
                call = stranger.stream_stream(DELTA)(metadata=((names.TOKEN_METADATA, token("a")),))
                assert await call.code() is grpc.StatusCode.UNAVAILABLE

    drive(test)


def test_stopping_ends_streams_and_a_new_server_takes_over(tmp_path: Path) -> None:
    async def test() -> None:
        fake, desired = FakeEnvoy("a"), simple({A: 10_000})
        for _round in range(2):
            async with world(tmp_path, "a") as made:
                made.server.publish({"a": desired})
                async with connected(made.target, fake, token("a")) as envoy:
                    await until("applied", lambda: made.applied("a"))
                    fake.received.clear()
                    await made.server.stop()
                    assert await envoy.call.code() is grpc.StatusCode.UNAVAILABLE
        assert fake.versions() == wanted(desired)

    drive(test)
