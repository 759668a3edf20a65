"""The client against a scripted HTTP server: what real Consul does too rarely to wait for in a test."""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trustme
from aiohttp import web

from mesh.clock import SystemClock
from mesh.consul.answers import TxnOp
from mesh.consul.client import Consul
from mesh.consul.errors import (
    BadRequest,
    ConsulError,
    Forbidden,
    NoLeader,
    NoPath,
    TooMany,
    Unreachable,
    classify,
)

TOKEN = "0c0ffee0-1111-2222-3333-444455556666"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class QuickClock(SystemClock):
    """Pauses of retries cost nothing; they are counted."""

    def __init__(self) -> None:
        self.pauses: list[float] = []

    async def sleep(self, s: float) -> None:
        self.pauses.append(s)
        await asyncio.sleep(0)


def against(
    handler: Handler, scene: Callable[[Consul], Awaitable[None]], clock: QuickClock | None = None
) -> None:
    """Run `scene` with a client whose agent answers with `handler`."""

    async def main() -> None:
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = runner.addresses[0][1]
            async with Consul(
                f"http://127.0.0.1:{port}", TOKEN, clock=clock or QuickClock(), rng=random.Random(3)
            ) as consul:
                await scene(consul)
        finally:
            await runner.cleanup()

    asyncio.run(main())


def answering(status: int, body: str, headers: dict[str, str] | None = None) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        assert request.headers["X-Consul-Token"] == TOKEN
        assert TOKEN not in str(request.url)
        return web.Response(status=status, text=body, headers=headers)

    return handler


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (403, "Permission denied", Forbidden),
        (403, "ACL not found", Forbidden),
        (429, "Your IP is issuing too many concurrent connections", TooMany),
        (500, "No cluster leader", NoLeader),
        (500, "No path to datacenter", NoPath),
        (500, "rpc error getting client: failed to get conn: dial tcp 127.1.1.1:8300: refused", NoPath),
        (400, "Invalid index", BadRequest),
        (413, "Request body too large", BadRequest),
        (500, "something else", ConsulError),
        (503, "", ConsulError),
    ],
)
def test_each_trouble_is_an_error_of_its_kind_with_consuls_reason(
    status: int, body: str, kind: type[ConsulError]
) -> None:
    async def scene(consul: Consul) -> None:
        with pytest.raises(kind) as caught:
            await consul.kv_put("k", b"v")
        assert type(caught.value) is kind
        assert caught.value.status == status
        assert body in caught.value.why
        assert "/v1/kv/k" in caught.value.what
        assert TOKEN not in str(caught.value) + repr(caught.value) + repr(consul)

    against(answering(status, body), scene)


def test_a_404_of_consul_is_nothing_there_any_other_404_is_an_error() -> None:
    async def nothing(consul: Consul) -> None:
        assert await consul.kv_get("k") is None
        page = await consul.kv_list("p/", index=3, wait_s=1)
        assert (page.index, page.entries) == (12, ())

    against(answering(404, "", {"X-Consul-Index": "12"}), nothing)

    async def wrong_address(consul: Consul) -> None:
        with pytest.raises(BadRequest):
            await consul.kv_list("p/")

    against(answering(404, "<html>not found</html>"), wrong_address)


def test_an_answer_that_is_no_json_is_a_consul_error() -> None:
    async def scene(consul: Consul) -> None:
        with pytest.raises(ConsulError) as caught:
            await consul.kv_get("k")
        assert "no JSON" in caught.value.why

    against(answering(200, "<html>", {"X-Consul-Index": "1"}), scene)


def test_plain_reads_are_tried_again_after_429_and_eof_writes_and_blocking_reads_are_not() -> None:
    calls: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        calls.append(request.method)
        if len(calls) == 1:
            return web.Response(status=429, text="too many")
        if len(calls) == 2:
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        return web.json_response([], headers={"X-Consul-Index": "9"})

    clock = QuickClock()

    async def scene(consul: Consul) -> None:
        assert (await consul.get("/v1/health/service/x")).body == []
        assert len(clock.pauses) >= 1
        calls.clear()
        with pytest.raises(TooMany):
            await consul.get("/v1/health/service/x", index=4, wait_s=1)
        calls.clear()
        with pytest.raises(TooMany):
            await consul.kv_put("k", b"")
        assert calls == ["PUT"]

    against(handler, scene, clock)


def test_the_first_read_of_a_watch_waits_for_the_log_of_a_new_leader_and_the_others_do_not() -> None:
    """Measured on 1.8.7: a restarted server answers a plain read with a part of what it had, or nothing."""
    asked: list[tuple[str, bool]] = []

    async def handler(request: web.Request) -> web.Response:
        asked.append((request.query.get("index", ""), "consistent" in request.query))
        return web.json_response([], headers={"X-Consul-Index": "9"})

    async def scene(consul: Consul) -> None:
        for index in (None, 0, 9):
            await consul.kv_list("p/", None, index, None if index is None else 1)

    against(handler, scene)
    assert asked == [("", False), ("0", True), ("9", False)]


def test_no_agent_at_all_is_unreachable_and_names_the_address() -> None:
    async def main() -> None:
        async with Consul("http://127.0.0.1:1", TOKEN, clock=QuickClock()) as consul:
            with pytest.raises(Unreachable) as caught:
                await consul.self_info()
            assert "127.0.0.1:1" in caught.value.what
            assert "CONSUL_HTTP_ADDR" in caught.value.way_out

    asyncio.run(main())


def test_what_is_too_large_is_refused_before_it_is_sent() -> None:
    async def main() -> None:
        async with Consul("http://127.0.0.1:1") as consul:
            with pytest.raises(BadRequest, match="600000 bytes"):
                await consul.kv_put("config/traffic/canary-weight", b"x" * 600_000)
            with pytest.raises(BadRequest, match="65 operations"):
                await consul.txn([TxnOp.put(f"k{i}", b"") for i in range(65)])

    asyncio.run(main())


@pytest.mark.parametrize("address", ["", "127.0.0.1:8500", "unix:///run/consul.sock", "ftp://x", "http://"])
def test_a_wrong_address_is_told(address: str) -> None:
    with pytest.raises(BadRequest):
        Consul(address)


def test_the_environment_is_read_as_the_consul_cli_does(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    assert Consul.from_env({}).address == "http://127.0.0.1:8500"
    env = {"CONSUL_HTTP_ADDR": "consul.example:8501", "CONSUL_HTTP_SSL": "true"}
    assert Consul.from_env(env).address == "https://consul.example:8501"
    by_file = Consul.from_env({"CONSUL_HTTP_TOKEN_FILE": str(file)}, address="http://127.1.1.1:8500")
    assert by_file.address == "http://127.1.1.1:8500"
    assert by_file.exchange_headers() == {"X-Consul-Token": TOKEN}
    with pytest.raises(BadRequest, match="TOKEN_FILE"):
        Consul.from_env({"CONSUL_HTTP_TOKEN_FILE": str(tmp_path / "absent")})


def test_classify_cuts_a_long_body() -> None:
    assert len(classify(500, "GET /x", "y" * 10_000).why) < 400


def test_https_is_checked_against_the_given_ca_and_shows_our_certificate(tmp_path: Path) -> None:
    ca, stranger = trustme.CA(), trustme.CA()
    files = {name: str(tmp_path / name) for name in ("ca", "other", "cert", "key")}
    ca.cert_pem.write_to_path(files["ca"])
    stranger.cert_pem.write_to_path(files["other"])
    ours = ca.issue_cert("client.example")
    ours.cert_chain_pems[0].write_to_path(files["cert"])
    ours.private_key_pem.write_to_path(files["key"])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ca.issue_cert("127.0.0.1").configure_cert(context)
    ca.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED

    async def leader(_: web.Request) -> web.Response:
        return web.json_response("127.0.0.1:8300", headers={"X-Consul-Index": "1"})

    async def main() -> None:
        app = web.Application()
        app.router.add_get("/v1/status/leader", leader)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
            env = {
                "CONSUL_HTTP_ADDR": f"https://127.0.0.1:{runner.addresses[0][1]}",
                "CONSUL_CACERT": files["ca"],
                "CONSUL_CLIENT_CERT": files["cert"],
                "CONSUL_CLIENT_KEY": files["key"],
            }
            async with Consul.from_env(env, clock=QuickClock()) as consul:
                assert (await consul.get("/v1/status/leader")).body == "127.0.0.1:8300"
            async with Consul.from_env(env | {"CONSUL_CACERT": files["other"]}, clock=QuickClock()) as consul:
                with pytest.raises(Unreachable, match="certificate"):
                    await consul.get("/v1/status/leader")
        finally:
            await runner.cleanup()

    asyncio.run(main())
