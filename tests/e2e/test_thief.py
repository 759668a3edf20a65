"""Somebody at the control plane's socket with the wrong token, and what of a world lies open to others.

Law: the thief speaks gRPC to the real control planes of the shared world; no proxy of it is disturbed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import stat
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from envoy.extensions.transport_sockets.tls.v3 import secret_pb2
from envoy.service.discovery.v3 import discovery_pb2
from envoy.service.load_stats.v3 import lrs_pb2

from mesh.world.addresses import RegionAddresses
from mesh.xds import names
from tests.e2e.mesh_world import MeshWorld

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

ADS = "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources"
SOTW = "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources"
LRS = "/envoy.service.load_stats.v3.LoadReportingService/StreamLoadStats"
Heard = tuple[list[bytes], str]
ANSWER_S = 20.0
HERE = "us-east-1"
INGRESS, SIDECAR = f"{HERE}-ingress", "chat-stable-0-sidecar-proxy"
OTHERS_FILES = stat.S_IRWXG | stat.S_IRWXO


def _tokens(world: MeshWorld, region: str) -> dict[str, str]:
    """ADS token by proxy id, from the bootstrap files (mode 0600: only the world's owner can do this)."""
    found = {}
    for path in (world.folder / "regions" / region / "envoy").glob("*.json"):
        body = json.loads(path.read_text())
        pairs = body["dynamic_resources"]["ads_config"]["grpc_services"][0]["initial_metadata"]
        found[body["node"]["id"]] = next(p["value"] for p in pairs if p["key"] == names.TOKEN_METADATA)
    return found


def _first(node: str, type_url: str, *wanted: str) -> bytes:
    request = discovery_pb2.DeltaDiscoveryRequest(type_url=type_url, resource_names_subscribe=wanted)
    request.node.id = node
    return bytes(request.SerializeToString())


def _say(
    world: MeshWorld, region: str, token: str, data: bytes | None, method: str = ADS
) -> tuple[list[bytes], str]:
    """What the control plane of a region sends after this first message, and how it ends the call.

    Waits for one answer, or for the end of the call when there is none; ("…", "OPEN") while it is open.
    data None: the call alone. Who is refused for that would have the message race with the answer, and
    grpc.aio calls a message that came too late INTERNAL.
    """
    socket = world.world.layout.region(region).ads_socket

    async def main() -> Heard:
        async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
            metadata = ((names.TOKEN_METADATA, token),) if token else None
            call: Any = channel.stream_stream(method)(metadata=metadata)
            try:
                async with asyncio.timeout(ANSWER_S):
                    if data is not None:
                        await call.write(data)
                    answer = await call.read()
                    if answer is not grpc.aio.EOF:
                        return [answer], "OPEN"
                    return [], (await call.code()).name
            except grpc.aio.AioRpcError as error:
                return [], error.code().name
            finally:
                call.cancel()

    return asyncio.run(main())


def _uri(secret: secret_pb2.Secret) -> str:
    chain = x509.load_pem_x509_certificates(secret.tls_certificate.certificate_chain.inline_string.encode())
    san = chain[0].extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return san.get_values_for_type(x509.UniformResourceIdentifier)[0]


def _page(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def _refused(world: MeshWorld) -> float:
    lines = _page(world.world.address(HERE).control_plane_http + "/metrics").splitlines()
    return sum(float(s.rsplit(" ", 1)[1]) for s in lines if s.startswith("weir_xds_auth_failures_total{"))


@pytest.mark.parametrize("type_url", [names.SECRET, names.CLUSTER, names.LISTENER])
def test_a_thief_is_sent_nothing(calm: MeshWorld, type_url: str) -> None:
    tokens = _tokens(calm, HERE)
    elsewhere = _tokens(calm, "westeurope")
    assert set(tokens) >= {INGRESS, SIDECAR}
    before = _refused(calm)
    attempts = {
        "no token": (INGRESS, ""),
        "a made-up token": (INGRESS, "x" * 43),
        "the hash instead of the token": (INGRESS, _digest_in_consul(calm)),
        "a sidecar's token for the ingress": (INGRESS, tokens[SIDECAR]),
        "the ingress' token for a sidecar": (SIDECAR, tokens[INGRESS]),
        "a sidecar's token for its neighbour": ("chat-canary-2-sidecar-proxy", tokens[SIDECAR]),
        "a node nobody knows": ("nobody", "x" * 43),
        "a right token, a node nobody knows": ("nobody", tokens[SIDECAR]),
        "the token of this name in another region": (SIDECAR, elsewhere[SIDECAR]),
        "no name": ("", tokens[SIDECAR]),
    }
    for what, (node, token) in attempts.items():
        sent, end = _say(calm, HERE, token, _first(node, type_url, "leaf", "roots", "*"))
        assert sent == [], what
        assert end in ("UNAUTHENTICATED", "PERMISSION_DENIED", "INVALID_ARGUMENT", "UNAVAILABLE"), (what, end)
    assert _refused(calm) >= before + len(attempts) - 1
    assert calm.document(HERE)["applied"]


def _digest_in_consul(world: MeshWorld) -> str:
    code, body = world.consul(HERE, "GET", f"/v1/agent/service/{INGRESS}")
    assert code == 200
    return str(json.loads(body)["Meta"]["xds_token_sha256"])


def test_a_proxy_gets_its_own_leaf_and_no_other_by_any_name(calm: MeshWorld) -> None:
    token = _tokens(calm, HERE)[SIDECAR]
    asked = (
        "leaf",
        "roots",
        "ingress-gateway",
        "mesh-gateway",
        "leaf/ingress-gateway",
        "ingress-tls",
        "chat",
    )
    sent, end = _say(calm, HERE, token, _first(SIDECAR, names.SECRET, *asked))
    assert end == "OPEN"
    answer = discovery_pb2.DeltaDiscoveryResponse.FromString(sent[0])
    assert {r.name for r in answer.resources} == {"leaf", "roots"}
    for resource in answer.resources:
        secret = secret_pb2.Secret.FromString(resource.resource.value)
        if resource.name == "leaf":
            assert _uri(secret).endswith(f"/dc/{HERE}/svc/chat")
        else:
            assert b"PRIVATE" not in resource.resource.value
    sent, end = _say(calm, HERE, token, _first(SIDECAR, names.CLUSTER, "*"))
    assert end == "OPEN"
    own = discovery_pb2.DeltaDiscoveryResponse.FromString(sent[0])
    assert not [r.name for r in own.resources if r.name.startswith("chat.")], "the ingress' clusters"


def test_the_load_reports_and_the_old_protocol_are_guarded_too(calm: MeshWorld) -> None:
    report = lrs_pb2.LoadStatsRequest()
    report.node.id = INGRESS
    sent, end = _say(calm, HERE, "x" * 43, report.SerializeToString(), LRS)
    assert (sent, end) == ([], "UNAUTHENTICATED")
    sent, end = _say(calm, HERE, _tokens(calm, HERE)[SIDECAR], report.SerializeToString(), LRS)
    assert (sent, end) == ([], "PERMISSION_DENIED")
    assert _say(calm, HERE, "", None, SOTW) == ([], "UNIMPLEMENTED")


def test_sockets_stand_in_a_folder_of_ours_alone(calm: MeshWorld) -> None:
    layout = calm.world.layout
    for folder in (layout.runtime, layout.folder, layout.tls):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert folder.stat().st_uid == os.geteuid()
    sockets = [p for p in layout.runtime.iterdir() if stat.S_ISSOCK(p.stat().st_mode)]
    assert len(sockets) >= 2 * len(calm.names)
    assert {stat.S_IMODE(p.stat().st_mode) for p in sockets} == {0o600}


def test_no_secret_in_a_log_nor_in_a_file_that_others_may_read(calm: MeshWorld) -> None:
    secrets = _secrets(calm)
    assert len(secrets) >= 5 * len(calm.names) + 1
    files = list(_files(calm.folder))
    keys = [path for path, _, data in files if b"PRIVATE KEY" in data]
    assert any(path.name == "key.pem" for path in keys)
    for path, mode, data in files:
        found = [what for what, value in secrets.items() if value.encode() in data]
        if found or b"PRIVATE KEY" in data:
            assert not mode & OTHERS_FILES, (path, found)
            assert path.suffix != ".log", (path, found)
            assert "drills" not in path.parts, (path, found)


def test_no_page_shows_a_key(calm: MeshWorld) -> None:
    secrets = _secrets(calm)
    for region in calm.names:
        at = calm.world.address(region)
        for url in _pages(at):
            text = _page(url)
            assert "PRIVATE KEY" not in text, url
        for url in (at.control_plane_http + "/state", at.control_plane_http + "/metrics", at.ingress_metrics):
            assert not [what for what, value in secrets.items() if value in _page(url)], url
        _, services = calm.consul(region, "GET", "/v1/agent/services")
        assert not [what for what, value in secrets.items() if value.encode() in services]


def _pages(at: RegionAddresses) -> tuple[str, ...]:
    admin = at.ingress_admin
    return (f"{admin}/config_dump?include_eds", f"{admin}/certs", at.control_plane_http + "/state")


def _secrets(world: MeshWorld) -> dict[str, str]:
    out = {f"{r}/{p}": token for r in world.names for p, token in _tokens(world, r).items()}
    kept = world.world.secrets
    named = {"gossip": kept.gossip, "management": kept.management, **kept.roles}
    return out | {name: value for name, value in named.items() if value}


def _files(folder: Path) -> Iterator[tuple[Path, int, bytes]]:
    """Path, mode and content of every file."""
    # Consul replaces files and folders while we look: os.walk passes over those, rglob raises.
    for place, _, names_here in os.walk(folder):
        for path in (Path(place) / name for name in names_here):
            if path.is_file() and not path.is_symlink():
                with contextlib.suppress(FileNotFoundError):
                    yield path, path.stat().st_mode, path.read_bytes()
