"""Random histories of one proxy: publishes, delays in both directions, rejections, cuts, time.

Law: pure and seeded; a failing seed replays exactly. Safety (one in flight, make-before-break, no dangling
route) is asserted by the fake Envoy at every step; here we assert that it always ends on the latest
accepted set.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.xds import names
from mesh.xds.nack import Quarantine
from mesh.xds.resource_set import Resource, ResourceSet, gather
from mesh.xds.stream import DeltaStream
from mesh.xds.wire import decode_request
from tests.fakes.envoy import ALL, FakeEnvoy, MemoryLink, wanted
from tests.fakes.sets import cluster, endpoints, listener, routes

CLUSTERS = [f"chat.r{n}.{stage}" for n in (1, 2) for stage in ("stable", "canary")]


class World:
    """One proxy, one Envoy, and the dice."""

    def __init__(self, seed: int, *, poison: float) -> None:
        self.dice = random.Random(seed)
        self.poison, self.bad = poison, set[tuple[str, str]]()
        self.ever_bad = set[tuple[str, str]]()
        self.quarantine = Quarantine()
        self.envoy = FakeEnvoy(reject=self._reject, names_errors=self.dice.random() < 0.5)
        self.desired = self.some_set(poisoned=False)
        self.now = 0.0
        self.link = self.connect()

    def _reject(self, _type_url: str, name: str, version: str) -> str | None:
        return "bad" if (name, version) in self.bad else None

    def connect(self) -> MemoryLink:
        """A new stream; what was under way is lost."""
        link = MemoryLink(self.envoy, DeltaStream("p", self.now, self.quarantine), self.now)
        link.core.publish(self.desired)
        order = list(ALL)
        if self.dice.random() < 0.5:
            self.dice.shuffle(order)
        link.send(self.envoy.connect(order))
        return link

    def some_set(self, *, poisoned: bool) -> ResourceSet:
        """A consistent set: routed clusters, perhaps clusters that no route leads to yet."""
        there = self.dice.sample(CLUSTERS, self.dice.randint(1, len(CLUSTERS)))
        routed = self.dice.sample(there, self.dice.randint(1, len(there)))
        weights = {name: self.dice.randint(1, 5) for name in routed}
        parts: list[Resource] = [listener(port=8_080 + self.dice.randint(0, 2)), routes(weights)]
        for name in there:
            parts.append(cluster(name, self.dice.randint(1, 3)))
            parts.append(endpoints(name, 9_000 + self.dice.randint(0, 2)))
        made = gather(parts)
        made.check()
        if poisoned and self.dice.random() < self.poison:
            victim = self.dice.choice([r for r in made if r.type_url != names.LISTENER])
            self.bad.add((victim.name, victim.version))
        return made

    def _check_timeouts(self) -> None:
        """Envoy may have waited in vain only for what is gone or bad; for anything else we owed an answer."""
        bad = {name for name, _ in self.bad | self.ever_bad}
        late = {name for name in self.envoy.timeouts if name in self.desired.of(names.ENDPOINT)}
        assert late <= bad, f"endpoints that exist never came: {late - bad}"
        self.envoy.timeouts.clear()

    def nack_under_way(self) -> bool:
        """A rejection lost with its stream leaves half of an update in Envoy, and nobody who knows: Envoy
        tells the old versions, and of new clusters nothing. No server can repair what it is not told."""
        sent = (decode_request(data).error for data in self.link.to_server)
        return any(sent) or any(words for _, words in self.envoy.withheld)

    def step(self) -> None:
        """One thing happens."""
        link, draw = self.link, self.dice.random()
        if draw < 0.15:
            self.desired = self.some_set(poisoned=True)
            link.core.publish(self.desired)
        elif draw < 0.18 and not self.nack_under_way():
            self.link = self.connect()
        elif draw < 0.30:
            self.now += self.dice.choice((0.01, 0.2, 3.0))
            self.link.now = self.now
        elif draw < 0.55 and link.to_server:
            link.serve_one()
        elif draw < 0.80 and link.to_client:
            link.take_one()
        else:
            link.poll()

    def end_on(self, desired: ResourceSet) -> dict[str, dict[str, str]]:
        """Publish, and let everything that is under way arrive."""
        self.desired = desired
        self.link.core.publish(desired)
        self.link.settle_through_time(1_000.0)
        self._check_timeouts()
        return self.envoy.versions()


def run(seed: int, *, poison: float, steps: int = 150) -> World:
    world = World(seed, poison=poison)
    for _ in range(steps):
        world.step()
    return world


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32))
def test_without_rejections_envoy_ends_on_the_latest_set(seed: int) -> None:
    world = run(seed, poison=0.0)
    desired = world.some_set(poisoned=False)
    assert world.end_on(desired) == wanted(desired)
    assert world.link.core.state().applied
    assert world.link.poll() == ()


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32))
def test_after_any_rejections_a_good_set_is_reached(seed: int) -> None:
    world = run(seed, poison=0.5)
    desired = world.some_set(poisoned=False)
    world.ever_bad, world.bad = world.bad, set()
    # What was refused once stays in quarantine until it changes, so the last set must differ in each
    # resource.
    fresh = gather(_renewed(desired))
    assert world.end_on(fresh) == wanted(fresh)
    assert world.link.core.state().alarm is None


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32))
def test_with_a_bad_resource_in_the_last_set_all_the_rest_is_right(seed: int) -> None:
    world = run(seed, poison=0.3)
    world.end_on(gather(_renewed(world.some_set(poisoned=False))))
    desired = world.some_set(poisoned=False)
    free = [r for r in desired if r.type_url == names.ENDPOINT]
    victim = world.dice.choice(free)
    world.ever_bad, world.bad = world.bad, {(victim.name, victim.version)}
    got = world.end_on(desired)
    for name, version in wanted(desired)[names.ENDPOINT].items():
        if name != victim.name and name in got[names.CLUSTER]:
            assert got[names.ENDPOINT][name] == version
    assert got[names.CLUSTER].items() >= wanted(desired)[names.CLUSTER].items()


@pytest.mark.parametrize("seed", range(20))
def test_a_client_that_never_answers_gets_one_push_per_type(seed: int) -> None:
    world = World(seed, poison=0.0)
    while world.link.to_server:
        world.link.serve_one()
    sent = list(world.link.poll())
    for _ in range(100):
        world.link.core.publish(world.some_set(poisoned=False))
        sent += world.link.poll()
    assert len({push.type_url for push in sent}) == len(sent) <= len(ALL)


def _renewed(desired: ResourceSet) -> list[Resource]:
    """The same shape with content that no dice ever made."""
    parts: list[Resource] = [listener(port=9_999)]
    for name in desired.of(names.CLUSTER):
        parts += [cluster(name, 99), endpoints(name, 9_999)]
    return [*parts, routes({name: 77 for _, name in desired.of(names.ROUTE)["ingress"].refs})]
