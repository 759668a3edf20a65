"""Control planes and Consul servers killed, frozen, restored: traffic goes on, the next weight works.

Law: every case runs under load on the shared world, and mends what it broke.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mesh.world.plan import CONSUL, CONTROL_PLANE
from tests.e2e.breaking import frozen, held, kill, under_load
from tests.e2e.mesh_world import CANARY, MeshWorld

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

PRIMARY, SECOND, THIRD = "cn-north-1", "us-east-1", "westeurope"
WITNESS = "e2e/witness"
"""A key that no control plane touches: unlike the config keys, nobody repairs it after a restore."""


def test_a_killed_control_plane_comes_back_unnoticed_and_takes_the_next_weight(calm: MeshWorld) -> None:
    calm.put(SECOND, CANARY, "0.2")
    calm.applied(0.2)
    with under_load(calm) as load:
        kill(calm, SECOND, CONTROL_PLANE)
        calm.put(SECOND, CANARY, "0.3")
        calm.applied(0.3)
        load.lasts(1.0)
    load.unharmed()


@pytest.mark.slow
def test_a_control_plane_frozen_for_half_a_minute_stops_neither_traffic_nor_the_others(
    calm: MeshWorld,
) -> None:
    others = (PRIMARY, THIRD)
    with under_load(calm) as load:
        with frozen(calm, SECOND, CONTROL_PLANE):
            calm.put(THIRD, CANARY, "0.1")
            calm.applied(0.1, regions=others)
            load.lasts(30.0)
            calm.put(SECOND, CANARY, "0.2")
            assert calm.document(SECOND)["canary_weight"]["value"] == 0, "it was not frozen"
        calm.applied(0.2)
        load.lasts(1.0)
    load.unharmed()


def test_a_consul_server_held_down_stops_neither_traffic_nor_the_other_regions(calm: MeshWorld) -> None:
    """The primary's, which also holds the Connect CA: the others must not need it."""
    others = (SECOND, THIRD)
    with under_load(calm) as load:
        with held(calm, PRIMARY, CONSUL):
            calm.put(SECOND, CANARY, "0.2")
            calm.applied(0.2, regions=others)
            load.lasts(5.0)
        calm.applied(0.2)
        calm.put(PRIMARY, CANARY, "0.3")
        calm.applied(0.3)
        load.lasts(1.0)
    load.unharmed()


def test_a_killed_consul_agent_is_restarted_and_nobody_notices(calm: MeshWorld) -> None:
    with under_load(calm) as load:
        kill(calm, THIRD, CONSUL)
        calm.put(THIRD, CANARY, "0.25")
        calm.applied(0.25)
        load.lasts(1.0)
    load.unharmed()


def test_an_index_that_goes_backwards_ends_on_the_newer_value_everywhere(
    calm: MeshWorld, tmp_path: Path
) -> None:
    """`consul snapshot restore` brings back an old world with an old index; the others remember better."""
    calm.put(SECOND, CANARY, "0.1")
    calm.applied(0.1)
    calm.put(SECOND, WITNESS, "before")
    saved = str(tmp_path / "consul.snap")
    assert calm.consul_cli(SECOND, "snapshot", "save", saved).code == 0
    calm.put(SECOND, CANARY, "0.2")
    calm.applied(0.2)
    calm.put(SECOND, WITNESS, "after")
    with under_load(calm) as load:
        newest = _index(calm, SECOND)
        restored = calm.consul_cli(SECOND, "snapshot", "restore", saved)
        assert restored.code == 0, restored.err
        assert _index(calm, SECOND) < newest, "the index did not go backwards, so this proves nothing"
        calm.until("the newer value everywhere", lambda: {calm.get(r, CANARY) for r in calm.names} == {"0.2"})
        calm.applied(0.2)
        for region, value in ((SECOND, 0.3), (THIRD, 0.35)):
            calm.put(region, CANARY, f"{value}")
            calm.applied(value)
        load.lasts(1.0)
    load.unharmed()
    calm.delete(SECOND, WITNESS)


def _index(world: MeshWorld, region: str) -> int:
    code, body = world.consul(region, "GET", f"/v1/kv/{WITNESS}")
    assert code == 200
    index: int = json.loads(body)[0]["ModifyIndex"]
    return index
