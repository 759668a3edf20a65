"""The states of an instance: the table, what may not be, how the mesh sees them."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.consul import register
from mesh.consul.decode import RESTING
from services.lifecycle import AS_REGISTERED, CHANGES, IllegalChange, Lifecycle, State

ROUND = (State.RUNNING, State.DRAINING, State.ASLEEP, State.WAKING, State.RUNNING)


def at(state: State) -> Lifecycle:
    return Lifecycle(state)


def test_the_round_of_the_issue_is_in_the_table() -> None:
    life = Lifecycle()
    for state in ROUND:
        life.to(state)
    assert life.why_not_ready() == ""


@pytest.mark.parametrize(("was", "wanted"), list(product(State, State)))
def test_what_the_table_lacks_is_a_typed_error_and_changes_nothing(was: State, wanted: State) -> None:
    life = at(was)
    if wanted in CHANGES[was]:
        life.to(wanted)
        assert life.state is wanted
        return
    with pytest.raises(IllegalChange) as raised:
        life.to(wanted)
    assert (raised.value.was, raised.value.wanted, life.state) == (was, wanted, was)
    assert not life.can(wanted)


def test_traffic_is_only_reached_from_states_in_which_it_was_verified() -> None:
    assert {was for was in State if State.RUNNING in CHANGES[was]} == {
        State.STARTING, State.DRAINING, State.WAKING
    }  # fmt: skip


@given(st.lists(st.sampled_from(State), max_size=30))
def test_only_running_takes_requests_whatever_the_way(ways: list[State]) -> None:
    life = Lifecycle()
    for wanted in ways:
        if life.can(wanted):
            life.to(wanted)
        else:
            with pytest.raises(IllegalChange):
                life.to(wanted)
        assert bool(life.why_not_ready()) == (life.state is not State.RUNNING)


@pytest.mark.parametrize("state", State)
def test_one_that_leaves_never_comes_back(state: State) -> None:
    life = at(state)
    life.leave()
    assert life.why_not_ready()
    assert not any(life.can(s) for s in (State.RUNNING, State.ASLEEP, State.WAKING, State.STARTING))
    assert life.state is (State.DRAINING if state in (State.STARTING, State.RUNNING) else state)


@pytest.mark.parametrize("state", State)
def test_anything_may_die_and_the_first_reason_stays(state: State) -> None:
    life = at(state)
    life.die("fell off the bus")
    life.die("and again")
    assert life.state is State.DEAD
    assert state is State.DEAD or life.dead == "fell off the bus"


def test_consul_and_the_table_agree_on_who_takes_traffic() -> None:
    assert AS_REGISTERED[State.RUNNING] == register.READY
    others = {AS_REGISTERED[s] for s in State if s is not State.RUNNING}
    assert others == RESTING
    assert others == {
        register.DRAINING, register.ASLEEP, register.WAKING, register.STARTING, register.COLD,
        register.QUARANTINED,
    }  # fmt: skip
