"""Roles on a real agent with `default_policy = deny`: each can do its own work and not the others'."""

from __future__ import annotations

import asyncio
import json
import random
import stat
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from intentions.model import Action, Intention
from mesh.clock import SystemClock
from mesh.consul import acl, decode, lock, register
from mesh.consul.client import Consul
from mesh.consul.doors import open_intentions
from mesh.consul.errors import ConsulError, Forbidden
from mesh.consul.watch import Watch
from regions.cli.errors import Refused
from tests.contract.consul_agent import Agent, consul_agent

pytestmark = pytest.mark.real
SERVICES = ("chat", "embed")
KEY = "config/traffic/canary-weight"
CHAT = register.Instance(
    service="chat",
    id="chat-stable-0",
    region="dc",
    zone="a",
    stage="stable",
    version="v1",
    model="echo",
    tenant_class="all",
    address="127.102.7.10",
    port=9000,
    xds_token_sha256="ab" * 32,
)


class Deny:
    """An agent with ACLs on and a token per role."""

    def __init__(self, agent: Agent, tokens: dict[str, str]) -> None:
        self.agent, self.tokens = agent, tokens

    def as_role(self, role: str) -> Consul:
        """A client with this role's token; `nobody` has none, `management` may do everything."""
        known = {"nobody": "", "management": self.agent.token} | self.tokens
        return Consul(self.agent.http, known[role])


@pytest.fixture(scope="module")
def deny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deny]:
    folder = tmp_path_factory.mktemp("acl")
    with consul_agent(folder, "127.102.7.1", "dc", acl=True) as agent:

        async def arrange() -> dict[str, str]:
            async with Consul(agent.http, agent.token) as management:
                tokens = await acl.provision(management, SERVICES)
                assert await acl.provision(management, SERVICES, tokens) == tokens, "not idempotent"
                rows = (await management.get("/v1/acl/tokens")).body
                ours = [row for row in rows if row["Description"].startswith("weir: ")]
                assert len(ours) == len(tokens)
                await management.register(register.instance(CHAT))
                await management.kv_put("status/traffic/chat/dc", b"{}")
            return tokens

        yield Deny(agent, asyncio.run(arrange()))


Deed = Callable[[Consul], Awaitable[object]]


def _put(key: str) -> Deed:
    async def deed(consul: Consul) -> None:
        await consul.kv_put(key, b"0.1")

    return deed


def _read(key: str) -> Deed:
    async def deed(consul: Consul) -> None:
        # Single reads say 403; lists would only come back shorter.
        await consul.get(f"/v1/kv/{key}")

    return deed


def _leaf(service: str) -> Deed:
    async def deed(consul: Consul) -> None:
        await consul.leaf(service)

    return deed


def _register(service: str) -> Deed:
    async def deed(consul: Consul) -> None:
        await consul.register({"ID": f"{service}-acl-test", "Name": service, "Port": 1})
        await consul.deregister(f"{service}-acl-test")

    return deed


async def _sidecar(consul: Consul) -> None:
    await consul.register(register.instance(CHAT))


async def _gateway(consul: Consul) -> None:
    await consul.register(register.mesh_gateway("dc", "127.102.7.4", 8443, "cd" * 32))


async def _ingress(consul: Consul) -> None:
    await consul.register(register.ingress("dc", "127.102.7.3", 8443, "cd" * 32))


async def _see_endpoints(consul: Consul) -> None:
    found, _ = decode.endpoints((await consul.get("/v1/health/connect/chat")).body, "chat", "dc")
    if not found:
        raise Forbidden(403, "catalog", "filtered: nothing to be seen")


async def _write_intention(consul: Consul) -> None:
    door = await open_intentions(consul)
    await door.put(Intention("chat", "acl-test", Action.ALLOW))


async def _lock(consul: Consul) -> None:
    async with lock.hold(consul, "locks/drill", {"who": "test"}):
        pass


async def _self(consul: Consul) -> None:
    await consul.self_info()


async def _tokens(consul: Consul) -> None:
    await consul.get("/v1/acl/tokens")


DEEDS: dict[str, Deed] = {
    "put config": _put(KEY),
    "put status": _put("status/traffic/chat/dc"),
    "put epoch": _put("status/epochs/canary-weight"),
    "put audit": _put("audit/traffic/x"),
    "put drills": _put("drills/x"),
    "put elsewhere": _put("secrets/x"),
    "read config": _read(KEY),
    "read status": _read("status/traffic/chat/dc"),
    "leaf chat": _leaf("chat"),
    "leaf embed": _leaf("embed"),
    "leaf ingress": _leaf("ingress-gateway"),
    "register chat": _register("chat"),
    "register embed": _register("embed"),
    "register sidecar": _sidecar,
    "register ingress": _ingress,
    "register gateway": _gateway,
    "see endpoints": _see_endpoints,
    "write intention": _write_intention,
    "lock": _lock,
    "self": _self,
    "list tokens": _tokens,
}
WATCHER = {"see endpoints", "self"}
MAY: dict[str, set[str]] = {
    "control-plane": WATCHER
    | {"put config", "put status", "put epoch", "read config", "read status"}
    | {"leaf chat", "leaf embed", "leaf ingress", "register chat", "register embed"}
    | {"register ingress", "register gateway"},
    "instance-chat": WATCHER | {"leaf chat", "register chat", "register sidecar"},
    "instance-embed": WATCHER | {"leaf embed", "register embed"},
    "ingress": {"leaf ingress", "register ingress", "self"},
    "mesh-gateway": {"register gateway", "self"},
    "operator": WATCHER
    | {"put config", "put epoch", "put audit", "read config", "read status", "write intention", "lock"},
    "drill": WATCHER
    | {"put config", "put epoch", "put audit", "put drills", "read config", "read status", "lock"},
    "nobody": set(),
}


@pytest.mark.parametrize("role", MAY)
def test_a_role_can_do_its_work_and_nothing_else(deny: Deny, role: str) -> None:
    async def main() -> dict[str, str]:
        outcome = {}
        async with deny.as_role(role) as consul:
            for name, deed in DEEDS.items():
                try:
                    await deed(consul)
                    outcome[name] = "done"
                except Forbidden:
                    outcome[name] = "refused"
        return outcome

    outcome = asyncio.run(main())
    assert outcome == {name: "done" if name in MAY[role] else "refused" for name in DEEDS}


def test_a_list_without_the_right_is_empty_so_absence_is_no_proof(deny: Deny) -> None:
    """Consul filters lists instead of refusing them: why the marker key stands under config/traffic/."""

    async def main() -> None:
        async with deny.as_role("management") as management:
            await management.kv_put(KEY, b"0.2")
        async with deny.as_role("instance-chat") as consul:
            page = await consul.kv_list("config/traffic/")
            assert page.entries == ()

    asyncio.run(main())


def test_a_watch_outlives_its_token(deny: Deny) -> None:
    """Deleted and made again with the same secret (or: not yet replicated): the watch waits and resumes."""

    async def main() -> None:
        secret = deny.tokens["drill"]
        heard: list[object] = []

        async with (
            Consul(deny.agent.http, deny.agent.token) as management,
            Consul(deny.agent.http, secret) as own,
        ):

            async def fetch(index: int, wait_s: float) -> tuple[int, object]:
                page = await own.kv_list("config/traffic/", None, index, wait_s)
                return page.index, [entry.value for entry in page.entries]

            async def until(what: str, holds: Callable[[], bool]) -> None:
                deadline = time.monotonic() + 60
                while not holds():
                    assert time.monotonic() < deadline, f"not in 60 s: {what}; {heard} {watch.error}"
                    await asyncio.sleep(0.05)

            await management.kv_put(KEY, b"0.3")
            watch = Watch(
                "w",
                fetch,
                lambda value, _: heard.append(value),
                clock=SystemClock(),
                rng=random.Random(2),
                wait_s=1.0,
            )
            task = asyncio.create_task(watch.run())
            try:
                await until("first answer", lambda: heard == [[b"0.3"]])
                me = (await own.get("/v1/acl/token/self")).body
                await management.exchange("DELETE", f"/v1/acl/token/{me['AccessorID']}")
                await until("refused", lambda: "ACL not found" in str(watch.error))
                await management.kv_put(KEY, b"0.4")
                await acl.provision(management, SERVICES, deny.tokens)
                await until("resumed", lambda: watch.error is None and heard[-1] == [b"0.4"])
                assert heard == [[b"0.3"], [b"0.4"]]
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())


def test_no_token_stands_in_an_error(deny: Deny) -> None:
    async def main() -> None:
        secret = deny.tokens["ingress"]
        async with Consul(deny.agent.http, secret) as consul:
            with pytest.raises(ConsulError) as caught:
                await consul.leaf("chat")
            assert secret not in f"{caught.value} {caught.value!r} {consul!r}"

    asyncio.run(main())


def test_bootstrap_works_once(tmp_path: Path) -> None:
    extra = {"acl": {"enabled": True, "default_policy": "deny"}}
    with consul_agent(tmp_path, "127.102.8.1", "dc", extra=extra) as agent:

        async def main() -> None:
            async with Consul(agent.http) as consul:
                secret = await acl.bootstrap(consul)
                with pytest.raises(Refused):
                    await acl.bootstrap(consul)
            async with Consul(agent.http, secret) as management:
                tokens = await acl.provision(management, SERVICES)
                await acl.set_agent_token(management, tokens["agent"])
                acl.write_tokens(tmp_path / "tokens", tokens)

            assert acl.load_tokens(tmp_path / "tokens") == tokens
            modes = {stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "tokens").iterdir()}
            assert modes == {0o600}
            # With its own token the agent may put itself and registered services into the catalog.
            async with Consul(agent.http, tokens["instance-chat"]) as consul:
                await consul.register(register.instance(CHAT))
            async with Consul(agent.http, tokens["control-plane"]) as consul:
                deadline = time.monotonic() + 60
                while not (await consul.get("/v1/health/connect/chat")).body:
                    assert time.monotonic() < deadline, "instance never reached the catalog"
                    await asyncio.sleep(0.05)

        asyncio.run(main())


def test_every_policy_parses_and_names_its_service() -> None:
    for role in (*acl.roles_for(SERVICES), "anonymous"):
        assert "${" not in acl.rules(role, SERVICES)
    assert 'service "chat"' in acl.rules("control-plane", SERVICES)
    assert "embed" not in acl.rules("instance-chat", SERVICES)
    assert json.dumps(acl.rules("anonymous", ())).count("policy =") == 0


def test_tokens_made_in_the_primary_work_in_a_secondary(tmp_path: Path) -> None:
    east, west = "127.102.9.1", "127.102.10.1"
    with (
        consul_agent(tmp_path / "e", east, "east", primary="east", join_wan=[west], acl=True) as primary,
        consul_agent(tmp_path / "w", west, "west", primary="east", join_wan=[east], acl=True) as second,
    ):

        async def main() -> None:
            async with Consul(primary.http, primary.token) as management:
                tokens = await acl.provision(management, SERVICES)
            async with Consul(second.http, tokens["control-plane"]) as consul:
                deadline = time.monotonic() + 60
                while True:
                    try:
                        _, leaf = await consul.leaf("chat")
                        assert await consul.kv_put(KEY, b"0.1", dc="east")
                        break
                    except ConsulError as error:
                        # "ACL not found" until replicated: just what a watch must outlive.
                        if time.monotonic() > deadline:
                            raise AssertionError("token never replicated") from error
                        await asyncio.sleep(0.05)
                assert leaf.uri.endswith("/dc/west/svc/chat")

        asyncio.run(main())
