"""The load generator against a real HTTP server: what is sent when, and what is written down.

Law: no Envoy, no Consul; the server is a few lines of aiohttp on an address of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiohttp import web

from drills.load import Request, Sample, dye, open_loop
from drills.load_gate import OPENING
from mesh.xds.names import METADATA_HEADER

HOST = "127.102.71.1"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def server(handler: Handler, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Base URL of a server on a free port; gone with the block."""
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", handler)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    try:
        site = web.TCPSite(runner, HOST, 0, ssl_context=tls)
        await site.start()
        port = runner.addresses[0][1]
        yield f"{'https' if tls else 'http'}://{HOST}:{port}"
    finally:
        await runner.cleanup()


async def fine(request: web.Request) -> web.Response:
    await request.read()
    return web.Response(text="ok", headers={METADATA_HEADER: "region=east;stage=canary"})


def get(index: int) -> Request:
    return Request(f"/{index}", session=f"s{index % 2}")


def stream(index: int) -> Request:
    return Request(f"/{index}", body=b"{}", stream=True)


async def load(handler: Handler, make: Callable[[int], Request], n: int = 1, **how: Any) -> list[Sample]:
    async with server(handler) as url:
        return await open_loop([url], 200, n / 200, ca_file=None, make_request=make, **how)


def run(main: Coroutine[Any, Any, list[Sample]]) -> list[Sample]:
    return asyncio.run(main)


def test_every_request_is_recorded_with_its_place_in_the_plan() -> None:
    heard: list[Sample] = []
    found = run(load(fine, get, 20, on_sample=heard.append))
    assert [s.index for s in found] == list(range(20))
    assert sorted(heard, key=lambda s: s.index) == found
    assert all(s.ok and s.status == 200 and not s.error for s in found)
    assert {(s.region, s.stage) for s in found} == {("east", "canary")}
    assert [s.session for s in found[:3]] == ["s0", "s1", "s0"]
    gaps = [b.due_s - a.due_s for a, b in pairwise(found)]
    assert gaps == pytest.approx([1 / 200] * 19, abs=1e-4)
    assert all(s.due_s <= s.sent_s <= s.first_byte_s <= s.end_s for s in found)


def test_a_stalled_server_slows_no_sending_and_its_wait_counts() -> None:
    gate = asyncio.Event()
    arrived = 0

    async def stalled(request: web.Request) -> web.Response:
        nonlocal arrived
        arrived += 1
        if arrived == 30:
            gate.set()
        await gate.wait()
        return await fine(request)

    found = run(load(stalled, get, 30))
    # A closed loop would have waited for the first answer and never sent the thirtieth.
    assert all(s.ok for s in found)
    assert found[0].latency_s > found[29].due_s - found[0].due_s


def test_tls_is_checked_against_the_given_authority(tmp_path: Path) -> None:
    ours, strange = trustme.CA(), trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ours.issue_cert(HOST).configure_cert(context)
    for name, authority in (("ours", ours), ("strange", strange)):
        authority.cert_pem.write_to_path(str(tmp_path / name))

    async def both() -> list[Sample]:
        async with server(fine, context) as url:
            good = await open_loop([url], 100, 0.01, ca_file=tmp_path / "ours", make_request=get)
            bad = await open_loop([url], 100, 0.01, ca_file=tmp_path / "strange", make_request=get)
            return good + bad

    good, bad = run(both())
    assert good.ok
    assert (bad.ok, bad.status, bad.error) == (False, 0, "ClientConnectorCertificateError")


async def whole_stream(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    for piece in (b'data: {"a":1}\n\n', b"data: [DO", b"NE]\n\n"):
        await answer.write(piece)
    await answer.write_eof()
    return answer


async def unfinished_stream(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse()
    await answer.prepare(request)
    await answer.write(b'data: {"a":1}\n\n')
    await answer.write_eof()
    return answer


async def cut_stream(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse()
    await answer.prepare(request)
    await answer.write(b'data: {"a":1}\n\n')
    assert request.transport is not None
    request.transport.close()
    return answer


async def refused(_: web.Request) -> web.Response:
    return web.Response(status=429, headers={"retry-after": "1"})


async def moved(request: web.Request) -> web.Response:
    assert request.path != "/elsewhere", "a redirect was followed: two requests in one record"
    raise web.HTTPFound("/elsewhere")


@pytest.mark.parametrize(
    ("handler", "ok", "cut", "status", "error"),
    [
        (whole_stream, True, False, 200, ""),
        (unfinished_stream, False, True, 200, "stream ended without [DONE]"),
        (cut_stream, False, True, 200, "ClientPayloadError"),
        (refused, False, False, 429, "HTTP 429"),
    ],
)
def test_streams_end_well_or_are_called_cut(
    handler: Handler, ok: bool, cut: bool, status: int, error: str
) -> None:
    (found,) = run(load(handler, stream))
    assert (found.ok, found.cut, found.status, found.error) == (ok, cut, status, error)


def test_a_redirect_is_an_answer_and_not_followed() -> None:
    (found,) = run(load(moved, get))
    assert found.status == 302


def test_an_answer_that_never_comes_ends_at_the_deadline() -> None:
    async def never(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    (found,) = run(load(never, get, timeout_s=0.2))
    assert (found.ok, found.status, found.error, found.first_byte_s) == (False, 0, "timeout", 0.0)
    assert found.latency_s >= 0.2


def test_a_server_that_never_finishes_a_handshake_is_not_buried_under_new_ones(tmp_path: Path) -> None:
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "ca"))
    now_open = most = 0

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal now_open, most
        now_open += 1
        most = max(most, now_open)
        try:
            while await reader.read(4096):
                pass
        finally:
            now_open -= 1
            writer.close()

    async def buried() -> list[Sample]:
        async with await asyncio.start_server(mute, HOST, 0) as listening:
            url = f"https://{HOST}:{listening.sockets[0].getsockname()[1]}"
            return await open_loop([url], 400, 0.2, ca_file=tmp_path / "ca", make_request=get, timeout_s=0.7)

    found = run(buried())
    assert len(found) == 80
    assert {s.error for s in found} == {"timeout"}
    # Twice, since a server may notice the end of one connection after its successor has come.
    assert most <= 2 * OPENING < 80


def test_connections_are_kept_and_used_again() -> None:
    peers = set()

    async def remembered(request: web.Request) -> web.Response:
        assert request.transport is not None
        peers.add(request.transport.get_extra_info("peername"))
        return await fine(request)

    found = run(load(remembered, get, 100))
    assert all(s.ok for s in found)
    # A new one is for a moment when all the others are in use; on a busy machine many are late together.
    at_once = max(sum(s.due_s <= now.due_s <= s.end_s for s in found) for now in found)
    assert len(peers) <= OPENING + at_once


def test_nobody_there_is_recorded_too() -> None:
    (found,) = run(open_loop([f"http://{HOST}:9"], 100, 0.01, ca_file=None, make_request=get))
    assert (found.status, found.error) == (0, "ClientConnectorError")


def test_stop_ends_the_sending_and_keeps_what_is_under_way() -> None:
    async def stopped() -> list[Sample]:
        stop = asyncio.Event()

        def enough(sample: Sample) -> None:
            if sample.index == 3:
                stop.set()

        async with server(fine) as url:
            return await open_loop(
                [url], 100, 3600, ca_file=None, make_request=get, on_sample=enough, stop=stop
            )

    found = run(stopped())
    assert len(found) >= 4
    # However many were due by then, none is sent that was due only later (a timer may be early by its grain).
    heard = next(s.end_s for s in found if s.index == 3)
    assert max(s.due_s for s in found) <= heard + 0.05
    assert all(s.ok for s in found)


def test_a_bug_in_the_callers_part_is_heard() -> None:
    def broken(_: Sample) -> None:
        raise LookupError("no such region")

    with pytest.raises(ExceptionGroup) as caught:
        run(load(fine, get, 2, on_sample=broken))
    assert caught.group_contains(LookupError, match="no such region")


def test_a_cancelled_load_leaves_no_request_behind() -> None:
    async def cancelled() -> list[Sample]:
        entered = asyncio.Event()

        async def never(_: web.Request) -> web.Response:
            entered.set()
            await asyncio.Event().wait()
            raise AssertionError

        async with server(never) as url:
            sending = asyncio.create_task(open_loop([url], 100, 3600, ca_file=None, make_request=get))
            await entered.wait()
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            assert not [t for t in asyncio.all_tasks() if "send" in repr(t.get_coro())]
        return []

    run(cancelled())


@pytest.mark.parametrize(("urls", "rate"), [([], 10.0), (["http://127.0.0.1"], 0.0)])
def test_a_load_of_nothing_is_an_error(urls: list[str], rate: float) -> None:
    with pytest.raises(ValueError, match="rate > 0"):
        run(open_loop(urls, rate, 1, ca_file=None, make_request=get))


@pytest.mark.parametrize(
    ("header", "want"),
    [
        ("region=a;stage=b", ("a", "b")),
        ("stage=b;region=a;zone=c", ("a", "b")),
        ("", ("", "")),
        ("region", ("", "")),
    ],
)
def test_dye(header: str, want: tuple[str, str]) -> None:
    assert dye(header) == want
