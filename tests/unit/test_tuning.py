"""`--set`: every number that ships may be changed, and nonsense is named with what was meant."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from regions.cli.errors import UsageError
from services.answer_settings import AnswerSettings
from services.batching.model import BatchingSettings
from services.cli import register
from services.options import Told
from services.pool.parts import PoolSettings
from services.told import settings_of
from services.tuning import Knob, knobs, tuned

SHIPPED = {
    "pool.most_asleep": 8,
    "pool.busy": 0.85,
    "pool.given_back": 0.9,
    "scheduler.batch_size": 128,
    "scheduler.max_delay_ms": 50.0,
    "scheduler.concurrency": 4,
    "scheduler.backoff_factor": 1.5,
    "scheduler.cliff.drop": 0.3,
    "scheduler.cliff.lows": 2,
    "answers.write_s": 30.0,
}


def test_what_ships_is_what_was_agreed() -> None:
    found = {knob.name: knob.default for knob in knobs()}
    assert {name: found[name] for name in SHIPPED} == SHIPPED
    assert not {"pool.drain", "pool.drain.deadline_s", "scheduler.classes"} & set(found)


@pytest.mark.parametrize("knob", knobs(), ids=lambda knob: knob.name)
def test_each_can_be_set_and_nothing_else_moves(knob: Knob) -> None:
    name, default = knob.name, knob.default
    value = default / 1.25 if default < 1 else default + 1
    told = [f"{name}=0.5", f"{name}={value}"] if default < 1 else [f"{name}={value}"]
    all_of_it: dict[str, object] = {
        "pool": tuned("pool", PoolSettings(), told),
        "scheduler": tuned("scheduler", BatchingSettings(), told),
        "answers": tuned("answers", AnswerSettings(), told),
    }
    section, *path = name.split(".")
    it = all_of_it.pop(section)
    for word in path:
        it = getattr(it, word)
    assert (it, type(it)) == (value, type(default))
    assert all(other == type(other)() for other in all_of_it.values())


@pytest.mark.parametrize(
    ("text", "why", "way_out"),
    [
        ("pool.bussy=0.9", "no such setting", "nearest: pool.busy;"),
        ("busy=0.9", "no such setting", "nearest: pool.busy;"),
        ("scheduler.drop=0.4", "no such setting", "nearest: scheduler.cliff.drop;"),
        ("scheduler.back_off=2", "no such setting", "nearest: scheduler.backoff"),
        ("pool.busy", "not NAME=VALUE", "nearest: pool.busy;"),
        ("pool.drain.deadline_s=3", "option of its own", "--drain-deadline-s"),
        ("scheduler.classes=gold", "option of its own", "--tenants"),
        ("pool.busy=much", "not a number", "the default is 0.85 (share, 0 to 1)"),
        ("pool.busy=1.5", "busy = 1.5: from 0 to 1", "the default is 0.85"),
        ("pool.busy=nan", "finite", "the default is 0.85"),
        ("pool.most_asleep=2.5", "not a whole number", "the default is 8 (count)"),
        ("pool.heal_longest_s=1", "at least 10", "the default is 300 (seconds)"),
        ("scheduler.backoff_max_s=-1", "0 or more", "the default is 2"),
        ("scheduler.backoff_factor=0.5", "at least 1", "the default is 1.5 (factor)"),
        ("answers.write_s=0", "more than 0", "the default is 30 (seconds)"),
        ("scheduler.cliff.drop=0", "more than 0", "the default is 0.3"),
        ("scheduler.cliff.dwell_max=5", "at least dwell (10)", "the default is "),
    ],
)
def test_nonsense_is_refused_with_what_there_is(text: str, why: str, way_out: str) -> None:
    with pytest.raises(UsageError) as caught:
        settings_of(Told(listen="127.0.0.1:1", instance="i", region="r", tune=["pool.busy=0.8", text]))
    assert caught.value.what == f"--set {text}"
    assert why in caught.value.why
    assert caught.value.way_out.startswith(way_out) or way_out in caught.value.way_out


def test_what_is_set_reaches_pool_scheduler_and_answers_and_wins_over_an_option() -> None:
    sets = ["pool.busy=0.5", "scheduler.batch_size=4", "pool.busy=0.6", "scheduler.cliff.drop=0.5"]
    sets += ["answers.write_s=5"]
    found = settings_of(Told(listen="127.0.0.1:1", instance="i", region="r", batch_size=64, tune=sets))
    assert (found.pool.busy, found.answers.write_s) == (0.6, 5)
    assert (found.stack.batching.batch_size, found.stack.batching.cliff.drop) == (4, 0.5)


def test_the_list_needs_no_other_option() -> None:
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    done = CliRunner().invoke(app, ["executor", "--settings"])
    assert done.exit_code == 0
    for knob in knobs():
        assert f"{knob.name} " in done.stdout
