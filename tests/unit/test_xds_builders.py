"""The builders as functions: what comes out for which snapshot, judged on the parsed messages."""

from __future__ import annotations

from dataclasses import replace

import pytest
from envoy.config.core.v3 import health_check_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.model import CANARY, FULL, STABLE, Health, MeshSnapshot, Proxy, SnapshotError
from mesh.xds import names, resource_set, resources
from mesh.xds.failover import Hop, hops
from mesh.xds.resources import NotReady, build
from mesh.xds.routes import dyed
from regions.model import Gateways, RegionSet
from tests import xds_samples as samples
from tests.throwaway_ca import ThrowawayCa
from tests.xds_samples import CN, EU, US

CA = ThrowawayCa()


def ready(snap: MeshSnapshot) -> MeshSnapshot:
    """The snapshot with the leafs of its own proxies."""
    services = ("ingress-gateway", "mesh-gateway", "chat")
    return samples.with_leafs(snap, *(CA.leaf(s, snap.region) for s in services))


def assignment(snap: MeshSnapshot, region: str, stage: str, proxy: Proxy | None = None):
    built = build(ready(snap), proxy or samples.ingress())
    name = names.cluster("chat", region, stage)
    return built.of(names.ENDPOINT)[name if proxy is None else f"gateway~chat~{region}~{stage}"].message()


def by_priority(message) -> dict[int, list[str]]:
    """Addresses by priority."""
    found: dict[int, list[str]] = {}
    for group in message.endpoints:
        found.setdefault(group.priority, []).extend(
            e.endpoint.address.socket_address.address for e in group.lb_endpoints
        )
    return found


def without(snap: MeshSnapshot, *gone: tuple[str, str]) -> MeshSnapshot:
    return replace(snap, endpoints=tuple(e for e in snap.endpoints if (e.region, e.stage) not in gone))


# --- failover order ---


def test_a_canary_is_followed_by_stable_here_then_stable_of_the_failover_regions() -> None:
    assert hops(samples.regions(), CN, CN, CANARY) == (
        Hop(CN, CANARY, True), Hop(CN, STABLE, True), Hop(US, STABLE, False), Hop(EU, STABLE, False),
    )  # fmt: skip


def test_no_stand_in_is_ever_a_canary() -> None:
    for region in (CN, US, EU):
        for stage in (STABLE, CANARY):
            assert {hop.stage for hop in hops(samples.regions(), CN, region, stage)[1:]} <= {STABLE}


def test_in_one_network_all_regions_are_reached_directly() -> None:
    assert all(hop.direct for hop in hops(samples.regions("flat"), CN, US, CANARY))


# --- endpoints ---


def test_local_instances_are_direct_and_other_regions_go_through_their_gateways() -> None:
    found = by_priority(assignment(samples.snapshot(), CN, CANARY))
    assert found == {
        0: ["127.103.1.15"],
        1: ["127.103.1.10", "127.103.1.11"],
        2: ["127.103.2.4"],
        3: ["127.103.3.4"],
    }


def test_one_gateway_address_never_stands_twice_in_a_cluster() -> None:
    """Envoy keeps the first of two hosts with one address and drops the other without a word."""
    found = by_priority(assignment(samples.snapshot(), US, CANARY))
    assert found == {0: ["127.103.2.4"], 1: [], 2: ["127.103.1.10", "127.103.1.11"], 3: ["127.103.3.4"]}


def sick(*where: tuple[str, str]) -> MeshSnapshot:
    ends = samples.endpoints()
    return replace(
        samples.snapshot(),
        endpoints=tuple(
            replace(e, health=Health.CRITICAL) if (e.region, e.stage) in where else e for e in ends
        ),
    )


def test_the_gateway_of_a_dead_remote_canary_stands_in_as_stable_and_as_another_host() -> None:
    """Another host name, or Envoy (1.40) would go on with the connections that it has under the old SNI."""
    well, ill = (assignment(s, US, CANARY) for s in (samples.snapshot(), sick((US, CANARY))))
    assert (by_priority(well)[0], by_priority(well)[1]) == (["127.103.2.4"], [])
    assert (by_priority(ill)[0], by_priority(ill)[1]) == ([], ["127.103.2.4"])
    before, after = (
        next(e for g in m.endpoints if g.priority == p for e in g.lb_endpoints)
        for m, p in ((well, 0), (ill, 1))
    )
    assert after.metadata.filter_metadata["weir"]["stage"] == STABLE
    assert before.endpoint.hostname != after.endpoint.hostname


def test_a_remote_region_without_healthy_instances_gets_no_gateway_but_keeps_its_priorities() -> None:
    message = assignment(sick((US, CANARY), (US, STABLE)), US, CANARY)
    assert by_priority(message) == {0: [], 1: [], 2: ["127.103.1.10", "127.103.1.11"], 3: ["127.103.3.4"]}


@pytest.mark.parametrize(
    ("health", "status"),
    [
        (Health.PASSING, "HEALTHY"),
        (Health.WARNING, "HEALTHY"),
        (Health.CRITICAL, "UNHEALTHY"),
        (Health.DRAINING, "DRAINING"),
    ],
)
def test_health_as_envoy_says_it(health: Health, status: str) -> None:
    snap = replace(samples.snapshot(), endpoints=(samples.endpoint(CN, STABLE, 0, health),))
    end = assignment(snap, CN, STABLE).endpoints[0].lb_endpoints[0]
    assert health_check_pb2.HealthStatus.Name(end.health_status) == status


def test_a_sleeper_is_kept_beside_others_and_left_out_where_all_would_be_in_panic() -> None:
    def shown(*states: Health) -> list[str]:
        ends = tuple(samples.endpoint(CN, STABLE, n, health) for n, health in enumerate(states))
        group = by_priority(assignment(replace(samples.snapshot(), endpoints=ends), CN, STABLE))[0]
        return [address.rpartition(".")[2] for address in group]

    both = shown(Health.PASSING, Health.PASSING)
    assert shown(Health.ASLEEP, Health.PASSING) == shown(Health.ASLEEP, Health.WARNING) == both
    assert shown(Health.ASLEEP, Health.DRAINING) == shown(Health.ASLEEP, Health.CRITICAL) == both[1:]
    assert shown(Health.ASLEEP, Health.ASLEEP) == []


def test_locality_and_metadata_carry_region_zone_and_stage_for_load_reports() -> None:
    group = assignment(samples.snapshot(), CN, CANARY).endpoints[0]
    assert (group.locality.region, group.locality.zone, group.locality.sub_zone) == (CN, "a", CANARY)
    tags = dict(group.lb_endpoints[0].metadata.filter_metadata["weir"].items())
    assert tags == {
        "service": "chat",
        "region": CN,
        "stage": CANARY,
        "zone": "a",
        "instance": "chat-canary-0",
    }


def test_every_endpoint_finds_the_tls_settings_of_its_hop() -> None:
    built = build(ready(samples.snapshot()), samples.ingress())
    for name, cluster in built.of(names.CLUSTER).items():
        known = {m.match["hop"]: m for m in cluster.message().transport_socket_matches}
        for group in built.of(names.ENDPOINT)[name].message().endpoints:
            for end in group.lb_endpoints:
                hop = end.metadata.filter_metadata["envoy.transport_socket_match"]["hop"]
                tls = resource_set.unpack(known[hop].transport_socket.typed_config)
                tags = end.metadata.filter_metadata["weir"]
                assert tls.sni == names.sni("chat", tags["stage"], tags["region"], samples.TRUST_DOMAIN)
                sans = tls.common_tls_context.combined_validation_context.default_validation_context
                expected = names.spiffe("chat", tags["region"], samples.TRUST_DOMAIN)
                assert [m.matcher.exact for m in sans.match_typed_subject_alt_names] == [expected]


def test_the_gateway_address_of_the_row_serves_until_the_catalog_knows_one() -> None:
    rows = tuple(
        replace(r, gateways=Gateways(mesh="203.0.113.7:8443")) if r.name == US else r
        for r in samples.regions().regions
    )
    snap = replace(samples.snapshot(), regions=RegionSet(rows), gateways=())
    assert by_priority(assignment(snap, US, STABLE))[0] == ["203.0.113.7"]


def test_a_mesh_gateway_never_gives_one_stage_for_another() -> None:
    assert by_priority(assignment(samples.snapshot(), CN, CANARY, samples.mesh_gateway())) == {
        0: ["127.103.1.15"]
    }


# --- what changes with what ---


def versions(snap: MeshSnapshot, proxy: Proxy) -> dict[tuple[str, str], str]:
    return {(r.type_url, r.name): r.version for r in build(ready(snap), proxy)}


def changed(before: MeshSnapshot, after: MeshSnapshot, proxy: Proxy) -> set[str]:
    old, new = versions(before, proxy), versions(after, proxy)
    return {
        type_url.rsplit(".", 1)[-1]
        for type_url, name in old.keys() | new.keys()
        if old.get((type_url, name)) != new.get((type_url, name))
    }


def test_a_weight_change_touches_the_route_table_alone_and_rebuilds_nothing_else() -> None:
    # Content of its own: what other tests have built must not be found again here.
    ends = tuple(replace(e, weight=7) for e in samples.endpoints())
    before = replace(samples.snapshot(), endpoints=ends)
    after = replace(before, plans={"chat": samples.plan((CN, STABLE, FULL))})
    assert changed(before, after, samples.ingress()) == {"RouteConfiguration"}
    old, new = (build(ready(s), samples.ingress()) for s in (before, after))
    assert all(old.of(names.ENDPOINT)[n] is r for n, r in new.of(names.ENDPOINT).items())


def test_health_and_the_first_canary_touch_no_cluster_and_no_listener() -> None:
    before = without(samples.snapshot(), (CN, CANARY), (US, CANARY), (EU, CANARY))
    assert changed(before, samples.snapshot(), samples.ingress()) <= {
        "ClusterLoadAssignment",
        "RouteConfiguration",
    }


def test_an_intention_touches_only_the_routes_of_the_sidecar() -> None:
    before = samples.snapshot()
    assert changed(before, replace(before, intentions=()), samples.sidecar()) == {"RouteConfiguration"}


def test_rotating_roots_touch_only_the_secret() -> None:
    before = samples.snapshot()
    after = replace(before, roots=replace(before.roots, pems=(*before.roots.pems, "-----new root-----\n")))
    for proxy in (samples.ingress(), samples.sidecar(), samples.mesh_gateway()):
        assert changed(before, after, proxy) == {"Secret"}


# --- refusals ---


def test_without_leaf_or_roots_nothing_is_built() -> None:
    for snap in (samples.snapshot(), replace(ready(samples.snapshot()), roots=None)):
        with pytest.raises(NotReady):
            build(snap, samples.ingress())


def test_a_key_of_another_certificate_is_refused_and_not_shown() -> None:
    mine, other = CA.leaf("ingress-gateway", CN), CA.leaf("chat", CN)
    snap = samples.with_leafs(samples.snapshot(), replace(mine, key_pem=other.key_pem))
    with pytest.raises(SnapshotError, match="does not belong") as caught:
        build(snap, samples.ingress())
    assert "PRIVATE" not in str(caught.value)


def test_a_proxy_gets_no_leaf_but_its_own() -> None:
    built = build(ready(samples.snapshot()), samples.sidecar())
    chain = (
        built.of(names.SECRET)[names.LEAF_SECRET].message().tls_certificate.certificate_chain.inline_string
    )
    assert chain == CA.leaf("chat", CN).cert_pem
    assert set(built.of(names.SECRET)) == {names.LEAF_SECRET, names.ROOTS_SECRET}


def test_an_ingress_without_any_door_is_refused() -> None:
    with pytest.raises(SnapshotError, match="no door"):
        build(ready(samples.snapshot()), samples.ingress({}))


# --- dye ---


def test_dyed_requests_follow_the_plans_slices_of_that_stage() -> None:
    slices = samples.canary_15().slices
    assert dyed(slices, CANARY, frozenset()) == tuple(s for s in slices if s.stage == CANARY)


def test_a_canary_without_weight_can_be_tried_where_it_lives() -> None:
    slices = samples.plan((CN, STABLE, 4000), (US, STABLE, 6000)).slices
    assert [(s.region, s.stage, s.weight) for s in dyed(slices, CANARY, frozenset({US}))] == [
        (US, CANARY, 6000)
    ]
    assert dyed(slices, CANARY, frozenset()) == ()


# --- properties ---

slices = st.lists(
    st.tuples(st.sampled_from([CN, US, EU]), st.sampled_from([STABLE, CANARY]), st.integers(1, 5000)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=40, deadline=None)
@given(slices)
def test_routes_carry_the_slices_in_order_with_their_weights_on_known_clusters(pieces) -> None:
    pieces = [*pieces, (CN, STABLE, 1)]
    snap = replace(samples.snapshot(), plans={"chat": samples.plan(*pieces)})
    built = build(ready(snap), samples.ingress())  # checks that all references resolve
    table = built.of(names.ROUTE)[names.ROUTE_CONFIG].message()
    plain = [
        r
        for h in table.virtual_hosts
        for r in h.routes
        if r.route.HasField("weighted_clusters") and not r.match.headers
    ]
    assert len(plain) == 3  # prefix, exact, host
    for route in plain:
        found = [(c.name, c.weight.value) for c in route.route.weighted_clusters.clusters]
        assert found == [(names.cluster("chat", r, s), w) for r, s, w in pieces]
        assert route.route.weighted_clusters.use_hash_policy.value
        assert route.route.timeout.ToNanoseconds() == 0


@settings(max_examples=25, deadline=None)
@given(st.permutations(samples.endpoints()), st.permutations(samples.gateways()))
def test_the_order_in_which_facts_arrive_leaves_no_trace_in_the_bytes(ends, gates) -> None:
    snap = replace(samples.snapshot(), endpoints=tuple(ends), gateways=tuple(gates))
    for proxy in (samples.ingress(), samples.mesh_gateway()):
        assert build(ready(snap), proxy).version == build(ready(samples.snapshot()), proxy).version


def test_the_clusters_a_route_table_is_said_to_name_are_those_it_names() -> None:
    """The builder tells its references itself (walking the message is what a weight change waited for)."""
    canary = samples.canary_15()
    for plans in ({"chat": canary}, {"chat": samples.plan((CN, STABLE, FULL))}, {}):
        snap = replace(samples.snapshot(), plans=plans)
        table = resources._routes(snap)
        assert table.refs == frozenset(resource_set.references(table.message()))
