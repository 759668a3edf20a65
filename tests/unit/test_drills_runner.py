"""The runner in virtual time: gate, inject, heal whatever happens, prove, and say what is left."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from drills import report, scenario_file, session
from drills.active import Active, ActiveFile
from drills.bearing import Bearing
from drills.faults.base import FaultSpec
from drills.faults.table import build
from drills.history import Mark
from drills.model import Verdict
from drills.outcome import Outcome
from drills.pace import Stop
from drills.runner import Drill, Plan
from regions.cli.errors import Refused, WeirError
from tests.fakes.drill_world import FakeGenerator, FakeWorld, Quiet
from tests.virtual import run

TARGET = "cn-north-1"


class Stage:
    """A drill on a fake world."""

    def __init__(
        self,
        folder: Path,
        world: FakeWorld,
        name: str = "region-loss",
        bearing: Bearing | None = None,
        **settings: str,
    ) -> None:
        self.world, self.progress, self.stop = world, Quiet(), Stop()
        self.generator = FakeGenerator(world)
        self.active = ActiveFile(folder)
        chosen = {"load": "3", "duration": "6", "settle": "2", **settings}
        draft = scenario_file.read(name)
        self.scenario = scenario_file.decide(draft, chosen, region=TARGET, bearing=bearing)

    def run(self) -> Outcome:
        return run(self._run())

    async def _run(self) -> Outcome:
        plan = Plan(
            "20261101T101500Z-drill-ab12cd",
            "anna@host",
            "2026-11-01T10:15:00Z",
            self.scenario,
            self.world.doors(),
            self.generator,
            build,
            self.active,
            self.progress,
            self.stop,
        )
        return await Drill(plan).run()

    def judge(self) -> report.Report:
        facts = report.Facts("id", "anna@host", "2026-11-01T10:15:00Z", {})
        return report.build(facts, self.scenario, self.run())


@pytest.mark.parametrize("mode", ["kill", "freeze", "cut-off"])
def test_a_region_is_lost_and_comes_back(tmp_path: Path, mode: str) -> None:
    stage = Stage(tmp_path, FakeWorld(), mode=mode)
    made = stage.judge()
    assert made.verdict is Verdict.PASS, made.reason
    assert stage.progress.phases == ["gate", "load", "inject", "hold", "heal", "settle"]
    state = stage.world.regions[TARGET]
    assert (state.alive, state.frozen, stage.world.rules) == (True, False, [])
    assert made.outcome.healed
    assert not stage.active.path.exists()
    assert made.reaction is not None
    assert made.reaction.total_s == pytest.approx(0.81, abs=0.01)


def test_an_evacuation_moves_everything_and_is_restored(tmp_path: Path) -> None:
    stage = Stage(tmp_path, FakeWorld(), "region-evacuation")
    made = stage.judge()
    assert made.verdict is Verdict.PASS, made.reason
    assert stage.world.evacuated == set()


@pytest.mark.parametrize(
    ("name", "process"), [("control-plane-loss", "control-plane"), ("consul-loss", "consul")]
)
def test_after_the_healing_a_weight_change_is_tried_and_put_back(
    tmp_path: Path, name: str, process: str
) -> None:
    stage = Stage(tmp_path, FakeWorld(), name)
    made = stage.judge()
    assert made.verdict is Verdict.PASS, made.reason
    assert stage.world.calls[0] == f"hold {process}"
    assert stage.world.keys == {"config/traffic/canary-weight": b"0.1"}
    changed = next(j for j in made.judgements if j.what == "next_weight_change_s")
    assert changed.got is not None


def test_without_a_steady_state_nothing_is_broken(tmp_path: Path) -> None:
    world = FakeWorld()
    world.regions["westeurope"].alive = False
    stage = Stage(tmp_path, world)
    made = stage.judge()
    assert made.verdict is Verdict.UNKNOWN
    assert "regions-ready: westeurope: not running" in made.reason
    assert world.calls == []
    assert stage.generator.started == 0
    assert session.exit_code(report.to_json(made, "")) == 3


def test_load_that_fails_before_the_fault_stops_the_drill(tmp_path: Path) -> None:
    stage = Stage(tmp_path, FakeWorld())
    stage.generator = FakeGenerator(stage.world, broken=True)
    made = stage.judge()
    assert made.verdict is Verdict.UNKNOWN
    assert "success-rate: 0 of 0 requests failed" in made.reason
    assert stage.world.calls == []
    assert stage.generator.stopped == 1


def test_an_injection_that_fails_is_healed_and_is_no_pass(tmp_path: Path) -> None:
    stage = Stage(tmp_path, FakeWorld())
    stage.world.fail_on["signal SIGKILL"] = PermissionError("not yours")
    made = stage.judge()
    assert made.verdict is Verdict.UNKNOWN
    assert "kill-region could not be injected: not yours" in made.reason
    assert "up cn-north-1" in stage.world.calls
    assert made.outcome.healed


def test_a_half_made_cut_is_removed(tmp_path: Path) -> None:
    stage = Stage(tmp_path, FakeWorld(), mode="cut-off")
    stage.world.fail_on["iptables -I"] = WeirError("iptables", "no room")
    made = stage.judge()
    assert made.verdict is Verdict.UNKNOWN
    assert stage.world.rules == []
    assert made.outcome.healed


def test_what_cannot_be_healed_is_a_failure_and_told_by_hand(tmp_path: Path) -> None:
    stage = Stage(tmp_path, FakeWorld(never_up=True))
    made = stage.judge()
    assert made.verdict is Verdict.FAIL
    assert not made.outcome.healed
    assert made.outcome.by_hand == ("weir region up cn-north-1",)
    assert "no disk space" in made.outcome.proofs[0]
    left = stage.active.read()
    assert left is not None
    assert left.faults[0].do == "kill-region"


def test_healing_is_tried_again_until_it_is_proven(tmp_path: Path) -> None:
    stage = Stage(tmp_path, FakeWorld())
    stage.world.fail_on[f"up {TARGET}"] = WeirError("region", "port taken")

    def free_the_port_later() -> None:
        stage.world.fail_on.clear()

    stage.progress.on_phase["heal"] = lambda: None
    original = stage.world.up

    async def up(region: str) -> None:
        try:
            await original(region)
        finally:
            free_the_port_later()

    stage.world.up = up  # type: ignore[method-assign]
    made = stage.judge()
    assert made.outcome.healed
    assert stage.world.calls.count(f"up {TARGET}") == 2


@pytest.mark.parametrize("phase", ["gate", "load", "inject", "hold", "settle"])
def test_ctrl_c_in_any_phase_leaves_a_healed_world_and_a_report(tmp_path: Path, phase: str) -> None:
    stage = Stage(tmp_path, FakeWorld())
    stage.progress.on_phase[phase] = stage.stop.asked.set
    made = stage.judge()
    assert made.outcome.interrupted
    assert made.verdict is Verdict.UNKNOWN
    state = stage.world.regions[TARGET]
    assert state.alive
    assert state.broken_at is None
    assert not stage.active.path.exists()
    assert stage.generator.stopped == 1
    body = report.to_json(made, "page")
    assert session.exit_code(body) == 130
    json.dumps(body)


def test_the_second_ctrl_c_stops_the_healing_and_names_the_commands(tmp_path: Path) -> None:
    stage = Stage(tmp_path, FakeWorld(never_up=True))
    stage.progress.on_phase["hold"] = stage.stop.asked.set
    stage.progress.on_phase["heal"] = stage.stop.abandoned.set
    made = stage.judge()
    assert made.outcome.interrupted
    assert made.verdict is Verdict.FAIL
    assert made.outcome.by_hand == ("weir region up cn-north-1",)
    assert made.outcome.history.first(Mark.HEALED) is None
    assert stage.active.path.exists()


def test_ctrl_c_during_a_normal_healing_waits_for_it(tmp_path: Path) -> None:
    stage = Stage(tmp_path, FakeWorld())
    stage.progress.on_phase["heal"] = stage.stop.asked.set
    made = stage.judge()
    assert made.outcome.healed
    assert made.outcome.interrupted


def test_a_cut_off_without_the_right_is_refused_before_anything_happens(tmp_path: Path) -> None:
    stage = Stage(tmp_path, FakeWorld(), mode="cut-off")
    stage.world.may_set_rules = False
    with pytest.raises(Refused) as refused:
        stage.run()
    assert "--set mode=freeze" in refused.value.way_out
    assert stage.progress.phases == []
    assert stage.generator.started == 0


def test_a_full_disk_before_the_fault_breaks_nothing(tmp_path: Path) -> None:
    stage = Stage(tmp_path, FakeWorld())
    stage.active.path = tmp_path / "file" / "active.json"
    (tmp_path / "file").write_text("in the way")
    made = stage.judge()
    assert made.verdict is Verdict.UNKNOWN
    assert not [c for c in stage.world.calls if c.startswith("signal")]


def test_the_fault_is_on_disk_before_it_is_injected(tmp_path: Path) -> None:
    stage = Stage(tmp_path, FakeWorld())
    seen: list[Active | None] = []
    original = stage.world.signal

    def look(pids: object, sign: object) -> None:
        seen.append(stage.active.read())
        original(pids, sign)  # type: ignore[arg-type]

    stage.world.signal = look  # type: ignore[assignment, method-assign]
    stage.run()
    first = seen[0]
    assert first is not None
    assert (first.by, first.faults[0].target) == ("anna@host", TARGET)


def leave(active: ActiveFile, do: str, params: Mapping[str, str | float] | None = None) -> None:
    spec = FaultSpec(do, TARGET, "chat", "20261101T101500Z-drill-ab12cd", params or {})
    active.write(Active(spec.drill, "region-loss", "bert@host", "2026-11-01T10:00:00Z", (spec,)))


def test_what_a_dead_drill_left_is_healed_first(tmp_path: Path) -> None:
    world, active, said = FakeWorld(), ActiveFile(tmp_path), Quiet()
    leave(active, "freeze-region")

    async def scene() -> None:
        world.regions[TARGET].frozen = True
        await session.heal_leftovers(active, world.doors(), said)

    run(scene())
    assert not world.regions[TARGET].frozen
    assert active.read() is None
    assert said.phases == ["heal"]
    run(session.heal_leftovers(active, world.doors(), said))
    assert said.phases == ["heal"]


def test_leftovers_that_cannot_be_healed_refuse_the_next_drill(tmp_path: Path) -> None:
    world, active = FakeWorld(never_up=True), ActiveFile(tmp_path)
    world.regions[TARGET].alive = False
    leave(active, "kill-region")
    with pytest.raises(WeirError) as told:
        run(session.heal_leftovers(active, world.doors(), Quiet()))
    assert told.value.way_out == "weir region up cn-north-1"
    assert active.read() is not None


def test_a_record_that_cannot_be_read_is_no_silent_start(tmp_path: Path) -> None:
    active = ActiveFile(tmp_path)
    active.path.write_text("{")
    with pytest.raises(WeirError, match="unfinished drill"):
        active.read()
