"""A drill's load fits what serves: the default world's is as ever, a slow service gets what its row says."""

from __future__ import annotations

from pathlib import Path

import pytest

from drills import report, scenario_file, session, show
from drills.bearing import LEAST_RPS, Bearing
from drills.model import Expect, Load, Scenario
from mesh.world.consul_config import ConsulSecrets
from mesh.world.create import default_services_dir
from mesh.world.engines import ENGINES, defaults
from mesh.world.layout import WorldLayout
from mesh.world.spec import WorldSpec
from mesh.world.world import World
from regions.cli.errors import Refused
from regions.load import default_dir, load_regions
from tests.fakes.drill_world import FakeWorld
from tests.unit.test_drills_runner import Stage
from tests.unit.test_drills_scenarios import GOOD, write

SLOW = Bearing(2.0, "chat.yaml", 180.0)


def decided(name: str, bearing: Bearing | None, **settings: str) -> Scenario:
    return scenario_file.decide(scenario_file.read(name), settings, region="cn-north-1", bearing=bearing)


def world(folder: Path, engine: str, *only: str) -> World:
    """The description of the world that `weir up --engine …` makes; nothing runs. only: regions (all)."""
    services, rows = str(default_services_dir(ENGINES[engine].catalog)), load_regions(default_dir())
    regions = rows.only(only) if only else rows
    spec = WorldSpec(99, regions, engine=engine, services_dir=services, **defaults(engine))
    return World(WorldLayout(folder, folder), spec, ConsulSecrets(""))


@pytest.mark.parametrize("name", scenario_file.names())
def test_the_default_worlds_drills_are_what_their_files_say(tmp_path: Path, name: str) -> None:
    drill = session.scenario_of(world(tmp_path, "echo"), session.Ask(name, {}))
    assert drill == decided(name, None)
    assert drill.load == Load(rate=200.0, ingresses=drill.load.ingresses)
    assert drill.fitted is None
    assert "wanted" not in show.plan(drill)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", scenario_file.names())
def test_every_engines_rows_bear_a_load_that_can_be_judged(tmp_path: Path, engine: str, name: str) -> None:
    drill = session.scenario_of(world(tmp_path, engine), session.Ask(name, {}))
    assert LEAST_RPS <= drill.load.rate <= 200
    must = {Expect.RECOVERY_S, Expect.FAILED, Expect.SUCCESS_RATE, Expect.STREAMS_CUT}
    asked = {e.kind for e in decided(name, None).expectations}
    assert {e.kind for e in drill.expectations} >= must & asked
    assert drill.phases.heal_s >= ENGINES[engine].ready_s - ENGINES["echo"].ready_s


def test_a_slow_service_gets_a_share_of_what_one_region_is_declared_for() -> None:
    drill, wanted = decided("region-evacuation", SLOW), decided("region-evacuation", None)
    assert drill.load.rate == pytest.approx(1.6)
    assert drill.load.streams * 1.6 * 28 >= 9, "enough streams that one could be cut"
    assert (drill.limit(Expect.DYE_DEVIATION), drill.limit(Expect.FAILED)) == (None, 0)
    assert drill.phases.heal_s == wanted.phases.heal_s + 180
    told = show.plan(drill)
    for word in ("1.6 requests/s", "up to 200 wanted", "chat.yaml", "left out: dye_deviation"):
        assert word in told


def test_streams_are_more_only_where_the_cut_ones_are_counted() -> None:
    assert decided("region-loss", SLOW).load.streams == 0.1
    assert decided("control-plane-loss", SLOW, streams="0").load.streams == 0
    assert decided("control-plane-loss", SLOW).load.streams > 0.1


def test_a_rate_that_a_person_names_wins() -> None:
    drill = decided("region-evacuation", SLOW, rate="50")
    assert (drill.load.rate, drill.load.streams, drill.fitted) == (50, 0.1, None)
    few = decided("region-evacuation", Bearing(600, "chat.yaml"), rate="3")
    assert few.limit(Expect.DYE_DEVIATION) == 0.02, "more would have been possible, so it stays unknown"


def test_a_rate_that_a_file_names_wins_and_a_wish_gives_way(tmp_path: Path) -> None:
    for line, rate in (("rate: 50", 50), ("rate_up_to: 50", 1.6), ("rate_up_to: 1", 1), ("tokens: 9", 1.6)):
        name = write(tmp_path, f"{GOOD}load:\n  {line}\n")
        assert decided(name, SLOW).load.rate == pytest.approx(rate), line


def test_what_a_request_now_and_then_cannot_show_is_left_out() -> None:
    drill = decided("region-loss", Bearing(1.0, "chat.yaml"))
    assert drill.limit(Expect.RECOVERY_S) is None
    assert drill.limit(Expect.NO_NEW_REQUESTS_AFTER_S) == 2
    assert drill.fitted is not None
    assert [told.partition(":")[0] for told in drill.fitted.left_out] == ["dye_deviation", "recovery_s"]


def test_a_fitted_drill_passes_and_its_report_says_what_was_left_out(tmp_path: Path) -> None:
    stage = Stage(tmp_path, FakeWorld(), "region-evacuation", bearing=SLOW)
    made = stage.judge()
    assert made.verdict.value == "pass", made.reason
    body = report.to_json(made, "")
    assert body["requests"] < 40
    assert body["fitted"]["wanted"] == 200
    assert "dye_deviation" in body["fitted"]["left_out"][0]
    assert "fitted" not in report.to_json(Stage(tmp_path, FakeWorld(), "region-evacuation").judge(), "")


def test_a_world_of_one_region_has_nobody_who_lives_on(tmp_path: Path) -> None:
    alone = world(tmp_path, "torch", "cn-north-1")
    with pytest.raises(Refused, match="this world has no other"):
        session.scenario_of(alone, session.Ask("region-loss", {}))
    assert session.scenario_of(alone, session.Ask("control-plane-loss", {})).load.rate == pytest.approx(1.6)
