"""A stand-in for the part of Consul >= 1.9 that the intentions door uses. It asserts the contract.

Law: only for tests of the wire shape, never for one that claims "works on Consul". Written after Consul's
API documentation and sources (agent/structs/config_entry_intentions.go): an entry without sources, LegacyMeta
in a write, Action beside Permissions and a duplicate source are refused; `cas` is honoured; legacy writes are
an error here, so that a test sees it when the wrong API is used.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web

KIND = "service-intentions"


class FakeConsul19:
    """entries: by destination. calls: every write as "METHOD path?query", in order."""

    def __init__(self, version: str = "1.16.1") -> None:
        self.version = version
        self.index = 10
        self.entries: dict[str, dict[str, Any]] = {}
        self.calls: list[str] = []
        self.before_write: Callable[[], Awaitable[None]] | None = None
        self._changed = asyncio.Condition()

    async def set(self, name: str, sources: list[dict[str, Any]], **more: Any) -> None:
        """Another writer: put an entry in place."""
        async with self._changed:
            self.index += 1
            self.entries[name] = {
                "Kind": KIND, "Name": name, "Sources": sources, **more,
                "CreateIndex": self.index, "ModifyIndex": self.index,
            }  # fmt: skip
            self._changed.notify_all()

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        """Its address while the block runs."""
        app = web.Application()
        app.router.add_get("/v1/agent/self", self._self)
        app.router.add_get("/v1/connect/intentions", self._list)
        app.router.add_get(f"/v1/config/{KIND}", self._entries)
        app.router.add_put("/v1/config", self._put)
        app.router.add_delete(f"/v1/config/{KIND}/{{name}}", self._delete)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            yield f"http://{host}:{port}"
        finally:
            await runner.cleanup()

    async def _self(self, request: web.Request) -> web.Response:
        config = {"Version": self.version, "Datacenter": "cn-north-1", "NodeName": "n", "Server": True}
        return web.json_response({"Config": config, "DebugConfig": {"PrimaryDatacenter": "cn-north-1"}})

    async def _list(self, request: web.Request) -> web.Response:
        after = int(request.query.get("index", 0))
        if after:
            async with self._changed:
                await asyncio.wait_for(self._changed.wait_for(lambda: self.index > after), 30)
        rows = [
            {
                "SourceNS": "default", "SourceName": s["Name"], "DestinationNS": "default",
                "DestinationName": e["Name"], "SourceType": s.get("Type", "consul"),
                **{k: s[k] for k in ("Action", "Permissions", "Description") if k in s},
                **({"SourcePeer": s["Peer"]} if "Peer" in s else {}),
                "ModifyIndex": e["ModifyIndex"],
            }
            for e in self.entries.values()
            for s in e["Sources"]
        ]  # fmt: skip
        return self._json(rows)

    async def _entries(self, request: web.Request) -> web.Response:
        return self._json(list(self.entries.values()))

    async def _put(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["Kind"] == KIND
        refusal = why_refused(body)
        if refusal:
            return web.Response(status=500, text=refusal)
        if not await self._cas(request, body["Name"]):
            return web.json_response(False)
        await self.set(body["Name"], body["Sources"], **({"Meta": body["Meta"]} if "Meta" in body else {}))
        return web.json_response(True)

    async def _delete(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if not await self._cas(request, name):
            return web.json_response(False)
        async with self._changed:
            self.index += 1
            del self.entries[name]
            self._changed.notify_all()
        return web.json_response(True)

    async def _cas(self, request: web.Request, name: str) -> bool:
        self.calls.append(f"{request.method} {request.path_qs}")
        hook, self.before_write = self.before_write, None
        if hook is not None:
            await hook()
        assert "cas" in request.query, "every write of the door is a compare-and-set"
        now = self.entries[name]["ModifyIndex"] if name in self.entries else 0
        return int(request.query["cas"]) == now

    def _json(self, body: Any) -> web.Response:
        return web.json_response(body, headers={"X-Consul-Index": str(self.index)})


def why_refused(entry: dict[str, Any]) -> str:
    """Consul's reason not to take the entry; empty when it would."""
    sources = entry["Sources"]
    if not sources:
        return "At least one source is required"
    seen: set[tuple[str, str]] = set()
    for number, source in enumerate(sources):
        if source.get("LegacyMeta") is not None:
            return f"Sources[{number}].LegacyMeta must be omitted"
        if ("Permissions" in source) is ("Action" in source):
            return f"Sources[{number}]: either Action or Permissions"
        key = (source["Name"], source.get("Peer", ""))
        if key in seen:
            return f"Sources[{number}] defines {source['Name']} more than once"
        seen.add(key)
    return ""
