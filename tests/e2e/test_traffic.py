"""Coloured traffic moved by a Consul key, on three real regions: what is taken, what is refused, who wins.

Law: keys are written with Consul's plain HTTP API or the weir command, as people do it; what happened is read
from the answers of the ingress and from the status documents.
"""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from drills.load import Sample
from mesh.world.runner import weir_command
from tests.e2e.mesh_world import CANARY, REPO, MeshWorld, failures, shares, stage_share

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

SHARES = {"cn-north-1": 0.5, "us-east-1": 0.3, "westeurope": 0.2}


def test_one_key_in_any_region_moves_the_traffic_of_all(calm: MeshWorld) -> None:
    calm.put("westeurope", CANARY, "0.3")
    calm.applied(0.3)
    assert {calm.get(r, CANARY) for r in calm.names} == {"0.3"}
    samples = calm.load(90, 20)  # so many that 0.05 are 4.6 standard errors
    assert not failures(samples)
    assert stage_share(samples, "canary") == pytest.approx(0.3, abs=0.05)
    for region, share in SHARES.items():
        got = sum(v for (r, _), v in shares(samples).items() if r == region)
        assert got == pytest.approx(share, abs=0.06)
    calm.until("the share is observed", lambda: _observed(calm) == pytest.approx(0.3, abs=0.06))


def _observed(world: MeshWorld) -> float:
    body = world.weir("status", "--json").json
    share: float = body["traffic"]["chat"]["observed"]["canary"] or 0.0
    return share


def test_a_session_keeps_its_colour_while_the_canary_grows(calm: MeshWorld) -> None:
    before: dict[str, tuple[str, str]] = {}
    for weight in (0.05, 0.15, 0.3):
        calm.put("us-east-1", CANARY, f"{weight}")
        calm.applied(weight)
        samples = calm.load(75, 8, regions=("us-east-1",), session=lambda i: f"session-{i}")
        assert not failures(samples)
        assert stage_share(samples, "canary") == pytest.approx(weight, abs=0.06)
        now = _owners(samples)
        for session in before.keys() & now.keys():
            (region, stage), (later, colour) = before[session], now[session]
            assert later == region, "a growing canary moved a session to another region"
            assert not (stage == "canary" and colour == "stable"), "a session left the canary"
        before = now


def _owners(samples: list[Sample]) -> dict[str, tuple[str, str]]:
    """Who had each session. Not of requests that were tried twice: an instance that stood still on a busy
    machine is passed over, which is what retries are for. Those must be few."""
    found = {s.session: (s.region, s.stage) for s in samples if s.attempts == 1}
    assert len(found) > 0.9 * len(samples)
    return found


def test_a_change_between_regions_moves_no_more_than_it_has_to(calm: MeshWorld) -> None:
    calm.put(
        "us-east-1",
        "config/traffic/chat/regions",
        json.dumps({"cn-north-1": 50, "us-east-1": 30, "westeurope": 20}),
    )
    calm.until(
        "the shares stand everywhere",
        lambda: all(calm.get(r, "config/traffic/chat/regions") for r in calm.names),
    )
    names = [f"session-{i}" for i in range(600)]
    before = _owners(calm.load(75, 8, regions=("us-east-1",), session=lambda i: names[i]))
    calm.put(
        "us-east-1",
        "config/traffic/chat/regions",
        json.dumps({"cn-north-1": 40, "us-east-1": 30, "westeurope": 30}),
    )
    calm.until(
        "the new shares are applied", lambda: _share(calm, "us-east-1", "westeurope") == pytest.approx(0.3)
    )
    after = _owners(calm.load(75, 8, regions=("us-east-1",), session=lambda i: names[i]))
    both = before.keys() & after.keys()
    moved = sum(before[name][0] != after[name][0] for name in both) / len(both)
    assert moved == pytest.approx(0.1, abs=0.05)


def _share(world: MeshWorld, region: str, of: str) -> float:
    body = world.document(region)
    return float(body["regions"][of]) if body["applied"] else 0.0


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("abc", "not a number"),
        ("NaN", "not a number"),
        ("-0.1", "outside"),
        ("1.5", "outside"),
        ("", "empty"),
    ],
)
def test_a_bad_weight_is_refused_where_it_was_written_and_the_last_good_one_stays(
    calm: MeshWorld, value: str, why: str
) -> None:
    calm.put("us-east-1", CANARY, "0.2")
    calm.applied(0.2)
    calm.put("us-east-1", CANARY, value)
    refusal = calm.until("the refusal is told", lambda: calm.document("us-east-1")["refusals"])[0]
    assert (refusal["key"], why in refusal["reason"]) == (CANARY, True)
    told = calm.weir("status", "--json").json["traffic"]["chat"]["per_region"]
    assert why in told["us-east-1"]["refusal"]
    assert told["westeurope"]["refusal"] is None
    assert all(calm.document(r)["canary_weight"]["value"] == 0.2 for r in calm.names)
    assert calm.get("westeurope", CANARY) == "0.2", "a refused value is not carried"


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("config/traffic/chat/regions", '{"mars": 1}', "unknown region mars"),
        ("config/traffic/chat/regions", '{"us-east-1": 0}', "zero"),
        ("config/traffic/chat/evacuated", '["cn-north-1","us-east-1","westeurope"]', "all regions"),
        ("config/traffic/chat/canary-wieght", "0.5", "no such setting"),
    ],
)
def test_bad_settings_of_a_service_are_refused(calm: MeshWorld, key: str, value: str, why: str) -> None:
    calm.put("cn-north-1", key, value)
    refusals = calm.until("the refusal is told", lambda: calm.document("cn-north-1")["refusals"])
    assert why in refusals[0]["reason"]
    assert calm.document("cn-north-1")["reason"] == "as configured"


def test_a_value_of_600_kb_is_refused_by_consul_and_changes_nothing(calm: MeshWorld, tmp_path: Path) -> None:
    (tmp_path / "value").write_bytes(b"0" * 600 * 1024)
    done = calm.consul_cli("us-east-1", "kv", "put", CANARY, f"@{tmp_path / 'value'}")
    assert done.code != 0
    assert calm.get("us-east-1", CANARY) is None
    assert calm.document("us-east-1")["canary_weight"]["value"] == 0


def test_the_plain_consul_cli_moves_the_traffic(calm: MeshWorld) -> None:
    assert calm.consul_cli("westeurope", "kv", "put", CANARY, "0.15").code == 0
    calm.applied(0.15)


def test_a_deleted_key_means_its_default_and_a_wiped_prefix_is_no_order(calm: MeshWorld) -> None:
    calm.put("us-east-1", CANARY, "0.2")
    calm.put("us-east-1", "config/traffic/chat/canary-weight", "0.4")
    calm.applied(0.4)
    calm.delete("westeurope", "config/traffic/chat/canary-weight")
    calm.applied(0.2)
    calm.delete("us-east-1", "config/traffic/", "?recurse")
    refusals = calm.until("the fault is told", lambda: calm.document("us-east-1")["refusals"])
    assert "vanished" in refusals[0]["reason"]
    assert all(calm.document(r)["canary_weight"]["value"] == 0.2 for r in calm.names)
    assert calm.get("westeurope", CANARY) == "0.2"


def test_two_writers_at_once_end_on_one_winner_everywhere(calm: MeshWorld) -> None:
    for turn in range(5):
        pair = (("cn-north-1", f"0.{turn + 1}1"), ("westeurope", f"0.{turn + 1}2"))
        writers = [threading.Thread(target=calm.put, args=(region, CANARY, value)) for region, value in pair]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        values = {value for _, value in pair}

        def settled(values: set[str] = values) -> bool:
            held = {calm.get(r, CANARY) for r in calm.names}
            records = {calm.get(r, "status/epochs/canary-weight") for r in calm.names}
            origins = {json.loads(r)["epoch"] for r in records if r}
            return len(held) == 1 and held <= values and len(origins) == 1

        calm.until("one winner", settled)
        calm.applied(float(calm.get("us-east-1", CANARY) or 0))


def test_there_and_back_within_one_round_trip_ends_right(calm: MeshWorld) -> None:
    calm.put("us-east-1", CANARY, "0.1")
    calm.applied(0.1)
    for value in ("0.9", "0.1", "0.9", "0.1"):
        calm.put("us-east-1", CANARY, value)
    calm.applied(0.1)
    assert stage_share(calm.load(90, 10), "canary") == pytest.approx(0.1, abs=0.05)


def test_weir_traffic_plans_commits_waits_tells_and_undoes(calm: MeshWorld) -> None:
    unsure = calm.weir("traffic", "set", "0.25")
    assert unsure.code == 4
    assert "not confirmed" in unsure.err
    assert calm.get("us-east-1", CANARY) is None
    done = calm.weir("traffic", "set", "0.25", "--yes", "--json", "--reason", "growing")
    assert done.code == 0, done.err
    assert done.json["applied"] is True
    assert {calm.document(r)["canary_weight"]["value"] for r in calm.names} == {0.25}
    history = calm.weir("traffic", "history", "--json").json["changes"]
    assert (history[0]["why"], history[0]["after"]) == ("growing", "0.25")
    undone = calm.weir("traffic", "undo", "--yes")
    assert undone.code == 0, undone.err
    assert calm.get("us-east-1", CANARY) is None
    wrong = calm.weir("traffic", "set", "1.5", "--yes")
    assert (wrong.code, "outside [0, 1]" in wrong.err) == (2, True)


def test_evacuation_empties_a_region_and_the_last_one_is_not_evacuated(calm: MeshWorld) -> None:
    done = calm.weir("traffic", "evacuate", "cn-north-1", "--yes", "--json")
    assert done.code == 0, done.err
    samples = calm.load(100, 3)
    assert not failures(samples)
    assert {s.region for s in samples} == {"us-east-1", "westeurope"}
    assert calm.weir("traffic", "evacuate", "us-east-1", "--yes").code == 0
    refused = calm.weir("traffic", "evacuate", "westeurope", "--yes")
    assert (refused.code, "last one" in refused.err) == (4, True)
    for region in ("cn-north-1", "us-east-1"):
        assert calm.weir("traffic", "restore", region, "--yes").code == 0
    assert calm.get("us-east-1", "config/traffic/chat/evacuated") is None


def test_a_tester_chooses_a_colour_and_a_stranger_cannot_claim_one(calm: MeshWorld) -> None:
    dyed = calm.load(40, 1, headers={"x-weir-dye": "canary"})
    assert {s.stage for s in dyed} == {"canary"}
    claimed = calm.load(40, 1, headers={"x-envoy-upstream-metadata": "region=moon;stage=canary"})
    assert {s.stage for s in claimed} == {"stable"}


def test_ctrl_c_while_waiting_leaves_the_change_and_says_how_to_undo_it(calm: MeshWorld) -> None:
    control = calm.world.control("westeurope")
    control.hold("control-plane", "KILL")
    try:
        command = [
            *weir_command(),
            "traffic",
            "set",
            "0.2",
            "--yes",
            "--dir",
            str(calm.folder),
            "--timeout",
            "60",
        ]
        process = subprocess.Popen(command, cwd=REPO, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        try:
            written = next(line for line in process.stderr if "waiting until" in line)
            process.send_signal(signal.SIGINT)
            _, rest = process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == 130, rest
        assert "weir traffic undo" in rest
        assert "written as change" in written
        assert calm.get("us-east-1", CANARY) == "0.2"
    finally:
        control.release("control-plane")
    calm.applied(0.2)


def test_a_region_that_does_not_apply_is_named_with_the_reason(calm: MeshWorld) -> None:
    control = calm.world.control("westeurope")
    control.hold("control-plane", "KILL")
    try:
        done = calm.weir("traffic", "set", "0.2", "--yes", "--timeout", "2", "--json")
        assert done.code == 1
        assert "westeurope" in done.json["details"]
        assert "westeurope" in done.err
    finally:
        control.release("control-plane")
    calm.applied(0.2)
