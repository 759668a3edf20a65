"""Whether a service keeps up is seen before anything is broken, also where nothing has failed yet."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from drills.bearing import Bearing
from drills.history import Request
from drills.model import Verdict
from drills.strain import FEW, GROWTH, drowning
from regions.cli.errors import Exit, Refused
from tests.fakes.drill_world import START, FakeGenerator, FakeWorld
from tests.unit.test_drills_runner import Stage

SLOW = Bearing(2.0, "2 × capacity_rps 1 of chat.yaml")


def test_a_load_that_nobody_bears_is_refused_and_is_no_verdict(tmp_path: Path) -> None:
    stage = Stage(tmp_path, FakeWorld())
    stage.generator = FakeGenerator(stage.world, bears=7.0)
    with pytest.raises(Refused) as error:
        stage.run()
    assert error.value.exit_code is Exit.REFUSED
    assert error.value.what == "load of 200 requests/s"
    told = r"in 6 s 12\d\d requests were due and 4\d answered \([67]\.\d a second\)"
    assert re.search(told, error.value.why), error.value.why
    assert "--rate 3 (half" in error.value.way_out
    assert "no rate at all" in error.value.way_out
    assert (stage.world.calls, stage.generator.stopped) == ([], 1)
    assert not stage.active.path.exists()


def test_a_row_that_promises_too_much_is_named(tmp_path: Path) -> None:
    stage = Stage(tmp_path, FakeWorld(), "region-evacuation", bearing=Bearing(20.0, SLOW.row))
    stage.generator = FakeGenerator(stage.world, bears=3.0)
    with pytest.raises(Refused) as error:
        stage.run()
    assert error.value.what == "load of 16 requests/s"
    assert SLOW.row in error.value.way_out


def test_too_many_requests_said_by_the_service_are_no_fault_of_the_mesh(tmp_path: Path) -> None:
    stage = Stage(tmp_path, FakeWorld())
    stage.generator = FakeGenerator(stage.world, bears=150.0, queue=20)
    with pytest.raises(Refused, match=r"refused as too many \(429\)"):
        stage.run()
    assert stage.world.calls == []


def test_a_stall_that_passes_stops_no_drill(tmp_path: Path) -> None:
    stage = Stage(tmp_path, FakeWorld())
    stage.generator = FakeGenerator(stage.world, stall=(2.0, 3.5))
    made = stage.judge()
    assert made.verdict is Verdict.PASS, made.reason
    load = next(p for p in made.outcome.phases if p.name == "load")
    assert 3.4 < load.end_s - load.start_s < 4.0, "as long as the stall, not to the end of the patience"


def answered(rate: float, bears: float, seconds: float) -> list[Request]:
    """What a server of `bears` a second has answered after `seconds` of `rate`."""
    found, free = [], 0.0
    for n in range(int(rate * seconds) + 1):
        free = max(free, n / rate) + 1 / bears
        if free <= seconds:
            found.append(Request(START + n / rate, START + n / rate, free - n / rate, True, 200, "a"))
    return found


@given(
    rate=st.floats(0.5, 60), share=st.floats(0.05, 1.0), seconds=st.floats(3, 12), late=st.floats(0.0, 0.2)
)
def test_who_bears_the_rate_is_left_alone(rate: float, share: float, seconds: float, late: float) -> None:
    # late: the load's mark and the first request are not the same moment.
    made = answered(rate, rate / share, seconds)
    assume(rate * late < max(FEW, GROWTH * rate * seconds / 2) - 2)
    assert drowning(made, rate, START - late, START + seconds) is None


@given(bears=st.floats(0.5, 10), over=st.floats(1.5, 20), seconds=st.floats(3, 20))
def test_who_gets_half_as_much_again_is_seen_to_drown(bears: float, over: float, seconds: float) -> None:
    rate = bears * over
    assume(seconds * (rate - bears) / 2 > FEW + 2)
    found = drowning(answered(rate, bears, seconds), rate, START, START + seconds)
    assert found is not None
    assert found.good <= bears * seconds + 1
    assert abs(found.due - rate * seconds) <= 1 + 1e-9
