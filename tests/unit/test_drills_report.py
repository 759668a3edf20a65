"""The report: JSON as other tools read it, the page self-contained, well formed and escaped."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from drills import page, report, scenario_file, show
from drills.active import ActiveFile
from drills.chart import draw, place
from drills.faults.table import build
from drills.history import History
from drills.pace import Stop
from drills.runner import Drill, Plan
from drills.store import Store
from drills.svg import Axis
from drills.timeline import Line, timeline
from regions.cli.errors import Refused, UsageError, WeirError
from tests.fakes.drill_world import FakeGenerator, FakeWorld, Quiet
from tests.virtual import run

ISSUE_KEYS = (
    "schema_version",
    "drill",
    "verdict",
    "success_rate",
    "dye_deviation",
    "mttr_s",
    "mttr_parts",
    "requests",
    "failed",
    "retried",
    "streams_cut",
    "healed",
    "report",
)
ID = "20270115T080000Z-region-loss-ab12cd"
FACTS = report.Facts(
    ID,
    "anna@host",
    "2027-01-15T08:00:00.000Z",
    {"weir": "0.1.0", "envoy": "1.40.0", "consul": "1.8.7", "Python": "3.11", "kernel": "Linux 6"},
    "weir drill run region-loss",
)


@pytest.fixture
def made(tmp_path: Path) -> report.Report:
    """A killed region with some failures, in virtual time."""
    settings = {"rate": "60", "load": "10", "duration": "14", "settle": "4"}
    scenario = scenario_file.decide(scenario_file.read("region-loss"), settings, region="cn-north-1")
    scenario = replace(scenario, text="title: as the file has it\n")

    async def drill() -> Any:
        world = FakeWorld(lost_s=0.15)
        plan = Plan(
            ID,
            FACTS.by,
            FACTS.started,
            scenario,
            world.doors(),
            FakeGenerator(world),
            build,
            ActiveFile(tmp_path),
            Quiet(),
            Stop(),
        )
        return await Drill(plan).run()

    return report.build(FACTS, scenario, run(drill()))


def test_report_json_is_as_reviewed(made: report.Report, golden_json: Callable[[str, Any], None]) -> None:
    golden_json("drills/region-loss.json", report.to_json(made, "drills/report.html"))


def test_the_keys_of_the_issue_stand_first_and_survive_json(made: report.Report) -> None:
    body = json.loads(json.dumps(report.to_json(made, "page.html")))
    assert tuple(body)[: len(ISSUE_KEYS)] == ISSUE_KEYS
    assert sorted(body["mttr_parts"]) == ["applied", "decide", "detect", "push"]
    assert sum(body["mttr_parts"].values()) == pytest.approx(body["mttr_s"], abs=1e-5)
    assert body["requests"] - body["failed"] == round(body["success_rate"] * body["requests"])


class Balanced(HTMLParser):
    """Every element that is opened is closed, in order."""

    VOID = ("meta", "br", "link", "img", "input")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_asks_nobody(made: report.Report) -> None:
    html = page.render(made)
    parser = Balanced()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    assert {"svg", "table", "style"} <= set(parser.seen)
    assert not {"script", "link", "img", "iframe"} & set(parser.seen)
    outside = re.findall(r"https?://[^\s\"'<]+", html)
    assert set(outside) <= {"http://www.w3.org/2000/svg"}
    assert "@import" not in html
    assert "url(" not in html


def test_the_page_tells_verdict_figures_and_evidence(made: report.Report) -> None:
    html = page.render(made)
    lost = len(report.failed(made.history))
    assert lost > 0
    for told in (
        made.verdict.value,
        "anna@host",
        "1.40.0",
        "upstream connect error",
        "cn-north-1 started again",
    ):
        assert told in html
    assert f"{lost} × upstream connect error" in html


def test_what_servers_answer_cannot_write_into_the_page(made: report.Report) -> None:
    evil = "<script>alert(1)</script>"
    requests = tuple(replace(r, error=evil, region=evil) if not r.ok else r for r in made.history.requests)
    named = tuple(replace(r, region=evil) if n == 5 else r for n, r in enumerate(requests))
    history = replace(made.history, requests=named)
    html = page.render(report.build(FACTS, made.scenario, replace(made.outcome, history=history)))
    assert evil not in html
    assert "&lt;script&gt;" in html


def test_the_figure_is_xml_with_a_line_for_every_moment(made: report.Report) -> None:
    data = timeline(made.history)
    root = ElementTree.fromstring(draw(data))
    space = "{http://www.w3.org/2000/svg}"
    lines = [e.get("class", "") for e in root.iter(f"{space}line") if "event" in e.get("class", "")]
    assert lines == [f"event {k}" for k in ("inject", "detect", "applied", "heal", "healed")]
    bars = [e for e in root.iter(f"{space}rect") if e.get("class") == "ok"]
    assert len(bars) == len(data.slots)
    assert sum(s.requests for s in data.slots) == len(made.history.requests)


def test_without_load_the_figure_says_so() -> None:
    assert "No request was sent" in draw(timeline(History("a")))


def test_a_report_of_nothing_can_be_rendered_too(made: report.Report) -> None:
    """Refused at the gate: no request, no fault. The report must still be made."""
    empty = report.build(
        FACTS, made.scenario, replace(made.outcome, history=History("cn-north-1"), steady=())
    )
    body = report.to_json(empty, "x")
    assert body["verdict"] == "unknown"
    assert body["success_rate"] is None
    assert "No request was sent" in page.render(empty)


def test_retries_come_from_the_answers_and_else_from_envoys_counter(made: report.Report) -> None:
    assert report.retried(made.history) == sum(r.attempts > 1 for r in made.history.requests)
    untold = tuple(replace(r, attempts=0) for r in made.history.requests)
    assert report.retried(replace(made.history, requests=untold, retried_by_stat=7)) == 7
    assert report.retried(replace(made.history, requests=untold, retried_by_stat=None)) is None


def test_reports_are_kept_and_found_again(made: report.Report, tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(UsageError, match="no such report"):
        store.load("latest")
    for id_ in ("20270115T080000Z-a-1", "20270116T080000Z-b-2"):
        store.save(id_, report.to_json(made, str(store.page(id_))) | {"id": id_}, "<html></html>")
    assert store.load("latest")["id"] == "20270116T080000Z-b-2"
    assert store.load("20270115")["id"] == "20270115T080000Z-a-1"
    with pytest.raises(UsageError, match="fits 2 reports"):
        store.load("2027")


@pytest.mark.parametrize(("why", "left"), [(Refused, []), (WeirError, ["samples.jsonl"])])
def test_the_samples_of_a_refused_drill_go_and_those_of_a_broken_one_stay(
    tmp_path: Path, why: type[WeirError], left: list[str]
) -> None:
    store = Store(tmp_path)
    store.place("other").mkdir(parents=True)
    store.place("mine").mkdir()
    (store.place("mine") / "samples.jsonl").write_text("{}")
    with pytest.raises(why), store.unless_refused("mine"):
        raise why("load", "too much", "less")
    assert [path.name for path in store.place("mine").glob("*")] == left
    assert store.place("other").exists()


def test_the_terminal_shows_the_same_numbers(made: report.Report) -> None:
    console = Console(width=200, record=True, file=StringIO())
    console.print(show.summary(report.to_json(made, "x.html")))
    text = console.export_text()
    assert "FAIL" in text
    assert "success_rate" in text
    assert "report x.html" in text


@given(
    st.lists(st.tuples(st.floats(0, 60), st.sampled_from(("heal", "weight change", "applied"))), max_size=8)
)
def test_no_name_of_an_event_covers_another(events: list[tuple[float, str]]) -> None:
    """A change and its end are often a tenth of a second apart."""
    labels = place([Line(at, "mark", label) for at, label in sorted(events)], Axis(0.0, 60.0, 52.0, 828.0))
    assert [label.words for label in labels] == [f"{what} {at:+.2f} s" for at, what in sorted(events)]
    for one, other in itertools.combinations(labels, 2):
        assert one.row != other.row or one.end <= other.begin or other.end <= one.begin
    assert {label.row for label in labels} == set(range(max((label.row + 1 for label in labels), default=0)))
