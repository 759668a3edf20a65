"""May this one resource go now? The gates of `order.Gate`, decided by what the client has accepted.

Law: pure questions about one stream; nothing is changed here. Each answer is None (open) or the reason, in
words for a status page. Gates look at single resources by their references, so that one cluster which does
not warm holds only the routes that lead to it, and no weight change elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping

from mesh.xds import names, order
from mesh.xds.lane import Desired, Lane
from mesh.xds.resource_set import Reference, Resource
from mesh.xds.subscription import Held


def endpoints_of(cluster: Resource) -> frozenset[str]:
    """EDS names that a cluster takes its endpoints from."""
    return frozenset(name for type_url, name in cluster.refs if type_url == names.ENDPOINT)


def clusters_ready(resource: Resource, desired: Desired, lanes: Mapping[str, Lane]) -> str | None:
    """Gate.CLUSTERS_READY. Clusters that are not of the set stand in the bootstrap and are always ready."""
    clusters = desired.of(names.CLUSTER)
    cds, eds = lanes.get(names.CLUSTER), lanes.get(names.ENDPOINT)
    if (
        cds is not None
        and eds is not None
        and cds.in_force(clusters)
        and eds.in_force(desired.of(names.ENDPOINT))
    ):
        return None  # by far the most frequent case: only weights have changed
    for type_url, name in sorted(resource.refs):
        if type_url != names.CLUSTER or name not in clusters:
            continue
        going = cds is not None and cds.pending is not None and name in cds.pending.removed
        if cds is None or going or not cds.sub.accepted(name):
            return f"{resource.name} waits until cluster {name} is accepted"
        if eds is not None and _unsent(eds, desired, endpoints_of(clusters[name])):
            return f"{resource.name} waits until new endpoints of {name} are sent"
    return None


def _unsent(eds: Lane, desired: Desired, eds_names: frozenset[str]) -> bool:
    """Whether the client lacks endpoints that are not even on their way.

    On their way is enough: Envoy takes the messages of a stream in order. Waiting for the ACK instead
    would let steady endpoint churn starve the routes.
    """
    ways = {r.name: r.version for r in eds.pending.upserts} if eds.pending else {}
    for name in eds_names:
        resource = desired.of(names.ENDPOINT).get(name)
        if resource is None or not eds.sub.wants(name) or not eds.sub.differs(resource):
            continue
        if ways.get(name) != resource.version:
            return True
    return False


def unused(cluster: str, desired: Desired, lanes: Mapping[str, Lane], *, settling: bool) -> str | None:
    """Gate.UNUSED: no listener or route that the client has or is being sent refers to the cluster.

    settling: the stream is young; a type not asked for yet may still be asked for, with routes of an earlier
    stream that we do not know.
    """
    for type_url in order.USERS_OF_CLUSTERS:
        lane = lanes.get(type_url)
        kind = type_url.rsplit(".", 1)[-1]
        if lane is None or not lane.sub.asked:
            if settling and desired.of(type_url):
                return f"removal of {cluster} waits until {kind} is asked for"
            continue
        for name, held in lane.sub.known.items():
            refs = _refs(held, desired.of(type_url).get(name))
            if refs is None or (names.CLUSTER, cluster) in refs:
                return f"removal of {cluster} waits until {kind} {name} no longer leads there"
        if lane.pending and any((names.CLUSTER, cluster) in r.refs for r in lane.pending.upserts):
            return f"removal of {cluster} waits for an answer about {kind}"
    return None


def _refs(held: Held, wanted: Resource | None) -> frozenset[Reference] | None:
    """References of what the client has; None when its content is not known."""
    if held.resource is not None:
        return held.resource.refs
    if wanted is not None and held.version == wanted.version:
        return wanted.refs
    return None


def cluster_gone(endpoints: str, lanes: Mapping[str, Lane]) -> str | None:
    """Gate.CLUSTER_GONE: no cluster that the client has takes its endpoints from here."""
    cds = lanes.get(names.CLUSTER)
    if cds is None:
        return None
    for cluster in cds.pending.upserts if cds.pending else ():
        if endpoints in endpoints_of(cluster):
            return f"removal of endpoints {endpoints} waits for an answer about cluster {cluster.name}"
    for name, held in cds.sub.known.items():
        sources = endpoints_of(held.resource) if held.resource is not None else {name}
        if endpoints in sources:
            return f"removal of endpoints {endpoints} waits until cluster {name} has gone"
    return None
