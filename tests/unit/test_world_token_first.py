"""A new secondary with ACLs waits for its replication token, and nobody else waits."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest

from mesh.consul.errors import Forbidden
from mesh.world import token_first
from mesh.world.consul_config import ConsulSecrets
from mesh.world.layout import WorldLayout
from mesh.world.spec import WorldSpec
from mesh.world.world import World
from regions.load import load_regions
from tests.virtual import run

ROOT = Path(__file__).parents[2]


class LoopClock:
    """The loop's own (virtual) time."""

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    def time(self) -> float:
        return self.monotonic()

    async def sleep(self, s: float) -> None:
        await asyncio.sleep(s)


class Primary:
    """A Consul that knows the token from its `after`-th question on."""

    after = 3
    asked: list[str]

    def __init__(self, address: str, token: str, *, clock: Any) -> None:
        type(self).asked = []
        self.token = token

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing to close."""

    async def get(self, path: str) -> None:
        self.asked.append(f"{path} {self.token}")
        if len(self.asked) < self.after:
            raise Forbidden(403, "token", "ACL not found")


@pytest.fixture
def world(tmp_path: Path) -> World:
    spec = WorldSpec(number=101, regions=load_regions(ROOT / "regions"), services_dir="", acl=True)
    secrets = ConsulSecrets(gossip="g", management="m", roles={"replication": "r"})
    return World(WorldLayout(tmp_path / ".weir", tmp_path / "run"), spec, secrets)


def test_only_a_new_secondary_with_acls_waits(world: World) -> None:
    assert token_first.must_wait(world, "us-east-1")
    assert not token_first.must_wait(world, world.spec.primary)
    assert not token_first.must_wait(replace(world, spec=replace(world.spec, acl=False)), "us-east-1")
    (world.layout.region("us-east-1").consul_data / "raft").mkdir(parents=True)
    assert not token_first.must_wait(world, "us-east-1")


def test_it_asks_until_the_primary_knows_the_token(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_first, "Consul", Primary)
    run(token_first.token_known(world, "us-east-1", LoopClock()))
    assert Primary.asked == ["/v1/acl/token/self r"] * 3


def test_it_does_not_wait_for_ever(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_first, "Consul", Primary)
    monkeypatch.setattr(Primary, "after", 10**9)

    async def waited() -> float:
        await token_first.token_known(world, "us-east-1", LoopClock())
        return asyncio.get_running_loop().time()

    assert run(waited()) == pytest.approx(token_first.PATIENCE_S, abs=1.0)
