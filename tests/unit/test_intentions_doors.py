"""ConfigEntryDoor (Consul >= 1.9) against a stand-in: wire shape only.

NOT verified on a real agent: none newer than 1.8.7 could be had. tests/contract/test_intentions_door.py runs
on whatever Consul is found, so a newer one on PATH tests this door for real.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from intentions.model import WILDCARD, Action, Intention
from mesh.consul.client import Consul
from mesh.consul.doors import ConfigEntryDoor, IntentionsDoor, LegacyDoor, open_intentions
from mesh.consul.errors import ConsulError
from regions.cli.errors import Exit, Refused
from tests.fakes.consul19 import FakeConsul19

ALLOW, DENY = Action.ALLOW, Action.DENY
L7 = {"Name": "api", "Type": "consul", "Permissions": [{"Action": "deny", "HTTP": {"PathPrefix": "/x"}}]}


def with_door(use: Callable[[IntentionsDoor, FakeConsul19], Awaitable[None]]) -> None:
    async def run() -> None:
        fake = FakeConsul19()
        async with fake.serve() as address, Consul(address) as consul:
            await use(await open_intentions(consul), fake)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("version", "kind"),
    [
        ("1.8.7", LegacyDoor),
        ("1.9.0", ConfigEntryDoor),
        ("1.16.1+ent", ConfigEntryDoor),
        ("2.0.0", ConfigEntryDoor),
    ],
)
def test_the_version_chooses_the_door(version: str, kind: type[IntentionsDoor]) -> None:
    async def run() -> None:
        async with FakeConsul19(version).serve() as address, Consul(address) as consul:
            assert type(await open_intentions(consul)) is kind

    asyncio.run(run())


def test_put_list_and_delete() -> None:
    async def use(door: IntentionsDoor, fake: FakeConsul19) -> None:
        await door.put(Intention("chat", "web", ALLOW, "why"))
        await door.put(Intention("chat", WILDCARD, DENY))
        assert await door.list() == (
            Intention("chat", WILDCARD, DENY),
            Intention("chat", "web", ALLOW, "why"),
        )
        assert await door.delete("web", "chat")
        assert not await door.delete("web", "chat")
        assert await door.delete(WILDCARD, "chat")
        # Consul refuses an entry without sources: the last one takes the entry with it.
        assert fake.entries == {}
        assert [c.split("?")[0] for c in fake.calls] == [
            "PUT /v1/config", "PUT /v1/config", "PUT /v1/config", "DELETE /v1/config/service-intentions/chat",
        ]  # fmt: skip
        assert all("dc=cn-north-1" in c for c in fake.calls)

    with_door(use)


def test_replace_all_writes_each_destination_once() -> None:
    async def use(door: IntentionsDoor, fake: FakeConsul19) -> None:
        await fake.set("old", [{"Name": "web", "Action": "allow", "Type": "consul"}])
        await fake.set("*", [{"Name": "*", "Action": "allow", "Type": "consul"}])
        want = [Intention("chat", "a", ALLOW), Intention("chat", "b", ALLOW), Intention("*", "*", DENY)]
        todo = await door.replace_all(want)
        assert (todo.changes, len(fake.calls)) == (4, 3)
        assert set(await door.list()) == set(want)
        assert (await door.replace_all(want)).changes == 0
        assert len(fake.calls) == 3

    with_door(use)


def test_a_lost_race_is_run_again_and_keeps_the_other_writers_rule() -> None:
    async def use(door: IntentionsDoor, fake: FakeConsul19) -> None:
        async def rival() -> None:
            await fake.set("chat", [{"Name": "rival", "Action": "allow", "Type": "consul"}])

        fake.before_write = rival
        await door.put(Intention("chat", "web", ALLOW))
        assert {i.source for i in await door.list()} == {"rival", "web"}
        assert len(fake.calls) == 2

    with_door(use)


def test_a_race_that_never_ends_is_told() -> None:
    async def use(door: IntentionsDoor, fake: FakeConsul19) -> None:
        async def rival() -> None:
            await fake.set("chat", [{"Name": f"rival{fake.index}", "Action": "allow", "Type": "consul"}])
            fake.before_write = rival

        fake.before_write = rival
        with pytest.raises(ConsulError, match="other writers were faster"):
            await door.put(Intention("chat", "web", ALLOW))

    with_door(use)


def test_rules_that_are_not_ours_stay() -> None:
    async def use(door: IntentionsDoor, fake: FakeConsul19) -> None:
        peer = {"Name": "web", "Peer": "other", "Action": "allow", "Type": "consul"}
        await fake.set(
            "chat", [L7, peer, {"Name": "old", "Action": "allow", "LegacyMeta": {}, "LegacyID": "7"}]
        )
        await door.replace_all([Intention("chat", "web", ALLOW)])
        kept = fake.entries["chat"]["Sources"]
        assert L7 in kept
        assert peer in kept
        assert {s["Name"] for s in kept} == {"api", "web"}
        now = await door.read()
        assert now.ours == (Intention("chat", "web", ALLOW),)
        assert {f.source for f in now.foreign} == {"api", "web"}
        await door.replace_all([])
        assert fake.entries["chat"]["Sources"] == [L7, peer]

    with_door(use)


def test_an_l7_rule_is_never_overwritten() -> None:
    async def use(door: IntentionsDoor, fake: FakeConsul19) -> None:
        await fake.set("chat", [L7])
        for write in (door.replace_all, lambda rows: door.put(rows[0])):
            with pytest.raises(Refused) as caught:
                await write([Intention("chat", "api", ALLOW)])
            assert caught.value.exit_code is Exit.REFUSED
        assert fake.entries["chat"]["Sources"] == [L7]
        assert fake.calls == []

    with_door(use)


def test_a_watch_wakes_and_takes_an_l7_rule_for_a_deny() -> None:
    async def use(door: IntentionsDoor, fake: FakeConsul19) -> None:
        index, now = await door.watch_fetch(None, 1.0)
        assert now == ()
        waiting = asyncio.create_task(door.watch_fetch(index, 20.0))
        await fake.set("chat", [L7])
        woken, now = await asyncio.wait_for(waiting, 30)
        assert woken > index
        assert [(i.source, i.action) for i in now] == [("api", DENY)]

    with_door(use)
