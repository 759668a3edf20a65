"""The Connect CA gets a new root while requests and token streams flow.

Law: rotated the way an operator does it, by Consul's own API in the primary; what the Envoys hold is read
from a TLS handshake that trusts the new root alone.
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from mesh.world.addresses import SIDECAR
from tests.e2e.breaking import under_load
from tests.e2e.mesh_world import MeshWorld

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(420)]

PRIMARY = "cn-north-1"
ROTATED_S = 120.0
"""Consul spreads the signing of new leafs over half a minute by itself; the rest is for a slow machine."""
MOST_TOKENS = 32_768
"""The longest answer there is: half a minute and more, so that it outlasts the rotation."""


def test_a_new_root_reaches_every_sidecar_and_cuts_nothing(calm: MeshWorld, tmp_path: Path) -> None:
    shown: dict[str, float] = {}
    with (
        under_load(calm) as whole,
        under_load(calm, 2, stream=True, tokens=MOST_TOKENS, seconds=1) as streams,
    ):
        old, began = root(calm, PRIMARY), time.time()
        rotate(calm)

        def everywhere() -> bool:
            for region in set(calm.names) - set(shown):
                if root(calm, region) != old and serves_new_root(calm, region, tmp_path):
                    shown[region] = time.time()
            return len(shown) == len(calm.names)

        calm.until("every sidecar shows a leaf of the new root", everywhere, ROTATED_S)
        whole.lasts(2.0)
    whole.unharmed()
    streams.unharmed()
    spanning = [s for s in streams.samples if s.sent_s < began and s.end_s > shown[s.region]]
    assert spanning, "no stream outlived its leaf, so this proves nothing"


def rotate(world: MeshWorld) -> None:
    """A new key for Consul's built-in CA: it makes a root of it and lets the old one sign it across."""
    path = "/v1/connect/ca/configuration"
    body = json.loads(world.consul(PRIMARY, "GET", path)[1])
    key = ec.generate_private_key(ec.SECP256R1())
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL)
    body["Config"]["PrivateKey"] = key.private_bytes(*form, serialization.NoEncryption()).decode()
    assert world.consul(PRIMARY, "PUT", path, json.dumps(body).encode())[0] == 200


def root(world: MeshWorld, region: str) -> str:
    """PEM of the region's active root."""
    body = json.loads(world.consul(region, "GET", "/v1/agent/connect/ca/roots")[1])
    pem: str = next(r["RootCert"] for r in body["Roots"] if r["ID"] == body["ActiveRootID"])
    return pem


def serves_new_root(world: MeshWorld, region: str, folder: Path) -> bool:
    """Whether each sidecar of the region answers a new connection between peers of the active root only."""
    context = ssl.create_default_context(cadata=root(world, region))
    context.check_hostname = False  # its name is a SPIFFE id
    context.load_cert_chain(_leaf(world, region, folder))
    at = world.world.address(region)
    return all(_answers(at.instance(i), context) for i, _ in enumerate(world.world.spec.members(region)))


def _answers(host: str, context: ssl.SSLContext) -> bool:
    line = http.client.HTTPSConnection(host, SIDECAR, context=context, timeout=30)
    try:
        line.request("GET", "/health")
        return line.getresponse().status == 200
    except ssl.SSLCertVerificationError:
        return False
    finally:
        line.close()


def _leaf(world: MeshWorld, region: str, folder: Path) -> Path:
    """The region's ingress leaf with its key, as Consul signs it now."""
    body = json.loads(world.consul(region, "GET", "/v1/agent/connect/ca/leaf/ingress-gateway")[1])
    path = folder / f"{region}.pem"
    path.write_text(body["CertPEM"] + body["PrivateKeyPEM"])
    return path
