"""The intentions door on a real Consul agent: whichever version `mesh.tools` finds.

On 1.8 this runs LegacyDoor; with a Consul >= 1.9 on PATH the same tests run ConfigEntryDoor, which has
otherwise only met its stand-in (tests/unit/test_intentions_doors.py).
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from intentions.model import WILDCARD, Action, Intention
from intentions.precedence import decide
from mesh.consul.client import Consul
from mesh.consul.doors import ConfigEntryDoor, IntentionsDoor, LegacyDoor, open_intentions
from mesh.consul.errors import ConsulError
from mesh.consul.intentions_cli import register
from regions.cli.errors import Refused
from tests.contract.consul_agent import Agent, consul_agent

pytestmark = pytest.mark.real

ALLOW, DENY = Action.ALLOW, Action.DENY
NAMES = ("web", "batch", "chat")
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def primary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    folder = tmp_path_factory.mktemp("primary")
    with consul_agent(folder, "127.101.1.1", "cn-north-1", primary="cn-north-1") as agent:
        yield agent


@pytest.fixture(scope="module")
def secondary(primary: Agent, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    folder = tmp_path_factory.mktemp("secondary")
    with consul_agent(
        folder, "127.101.2.1", "us-east-1", primary="cn-north-1", join_wan=[primary.ip]
    ) as agent:
        yield agent


async def clean_door(consul: Consul) -> IntentionsDoor:
    door = await open_intentions(consul)
    await door.replace_all(())
    return door


def test_the_door_fits_the_version(primary: Agent) -> None:
    async def run() -> None:
        async with Consul(primary.http) as consul:
            version = (await consul.self_info()).version_tuple
            door = await open_intentions(consul)
            assert isinstance(door, ConfigEntryDoor if version >= (1, 9) else LegacyDoor)
            if version < (1, 9):
                # Why there are two doors at all.
                with pytest.raises(ConsulError, match="invalid config entry kind"):
                    await ConfigEntryDoor(consul).put(Intention("chat", "web", ALLOW))

    asyncio.run(run())


def test_put_change_and_delete(primary: Agent) -> None:
    async def run() -> None:
        async with Consul(primary.http) as consul:
            door = await clean_door(consul)
            await door.put(Intention("chat", "web", ALLOW, "first"))
            await door.put(Intention(WILDCARD, WILDCARD, DENY))
            await door.put(Intention("chat", "web", DENY, "second"))
            assert await door.list() == (
                Intention(WILDCARD, WILDCARD, DENY),
                Intention("chat", "web", DENY, "second"),
            )
            assert [i.source for i in await door.match("chat")] == ["web", WILDCARD]
            assert await door.delete("web", "chat")
            assert not await door.delete("web", "chat")
            assert await door.list() == (Intention(WILDCARD, WILDCARD, DENY),)

    asyncio.run(run())


def test_replace_all_and_the_same_verdict_as_consul(primary: Agent) -> None:
    """Our precedence is Consul's: for many rule sets, every pair is judged the same by both."""
    rng = random.Random(7)
    pairs = [(d, s) for d in (*NAMES, WILDCARD) for s in (*NAMES, WILDCARD)]

    async def run() -> None:
        async with Consul(primary.http) as consul:
            door = await clean_door(consul)
            for _ in range(6):
                want = [Intention(d, s, rng.choice((ALLOW, DENY))) for d, s in rng.sample(pairs, 5)]
                await door.replace_all(want)
                assert set(await door.list()) == set(want)
                assert (await door.replace_all(want)).changes == 0
                for source, destination in [(s, d) for s in NAMES for d in NAMES]:
                    params = {"source": source, "destination": destination}
                    answer = await consul.get("/v1/connect/intentions/check", params)
                    ours = decide(want, source, destination)
                    # Without a rule Consul (ACLs off) allows; weir always denies.
                    assert answer.body["Allowed"] is (ours.allowed if ours.rule else True)

    asyncio.run(run())


def test_a_watch_wakes_on_a_change(primary: Agent) -> None:
    async def run() -> None:
        async with Consul(primary.http) as consul, Consul(primary.http) as other:
            door = await clean_door(consul)
            index, now = await door.watch_fetch(None, 1.0)
            assert now == ()
            waiting = asyncio.create_task(door.watch_fetch(max(1, index), 60.0))
            await (await open_intentions(other)).put(Intention("chat", "web", ALLOW))
            woken, now = await asyncio.wait_for(waiting, PATIENCE_S)
            assert woken > index
            assert now == (Intention("chat", "web", ALLOW),)

    asyncio.run(run())


def test_two_writers_of_one_pair_end_on_one_of_them(primary: Agent) -> None:
    async def run() -> None:
        async with Consul(primary.http) as one, Consul(primary.http) as two:
            doors = [await clean_door(one), await open_intentions(two)]
            rivals = [Intention("chat", "web", ALLOW, "one"), Intention("chat", "web", DENY, "two")]
            for _ in range(5):
                await asyncio.gather(*(door.put(i) for door, i in zip(doors, rivals, strict=True)))
                (winner,) = await doors[0].list()
                assert winner in rivals
                gone = await asyncio.gather(*(door.delete("web", "chat") for door in doors))
                assert any(gone)
                assert await doors[0].list() == ()

    asyncio.run(run())


def test_a_secondary_writes_to_the_primary_and_watches_its_own_copy(primary: Agent, secondary: Agent) -> None:
    rule = Intention("chat", "web", ALLOW, "from afar")

    async def run() -> None:
        async with Consul(primary.http) as near, Consul(secondary.http) as far:
            door = await open_intentions(far)
            await door.replace_all([rule])
            # Written is read at once, without waiting for the copy.
            assert await door.list() == (rule,)
            assert await (await open_intentions(near)).list() == (rule,)
            async with asyncio.timeout(PATIENCE_S):
                index, now = await door.watch_fetch(None, 1.0)
                while now != (rule,):
                    index, now = await door.watch_fetch(max(1, index), 5.0)

    asyncio.run(run())


def test_the_commands_from_plan_to_check(primary: Agent, tmp_path: Path) -> None:
    (tmp_path / "catalog.yaml").write_text(
        "intentions:\n  - {source: web, destination: chat, action: allow, description: '[bold]x'}\n"
    )
    app = typer.Typer()
    register(app)
    at = ["--consul", primary.http.removeprefix("http://"), "--dir", str(tmp_path)]

    def weir(*args: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["intentions", *args, *at])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout

    async def empty() -> None:
        async with Consul(primary.http) as consul:
            await clean_door(consul)

    asyncio.run(empty())
    assert weir("plan") == (0, "+ web -> chat: allow\n")
    assert weir("plan", "--detailed-exitcode")[0] == 2
    with pytest.raises(Refused, match="not confirmed"):
        weir("apply")
    assert weir("check", "web", "chat")[0] == 1
    assert json.loads(weir("apply", "--yes", "--json")[1])["changes"] == 1
    assert weir("plan", "--detailed-exitcode") == (0, "")
    code, text = weir("check", "web", "chat", "--json")
    assert (code, json.loads(text)["rule"]["action"]) == (0, "allow")
    assert weir("check", "batch", "chat")[0] == 1
    code, text = weir("list", "--json")
    assert [i["description"] for i in json.loads(text)["intentions"]] == ["[bold]x"]
    assert "[bold]x" in weir("list")[1]
