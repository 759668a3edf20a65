"""SDS: the proxy's own leaf and the trusted roots.

Law: pure. A certificate is sent only with the key that belongs to it: an early refusal would make Envoy deaf
to every later update of that secret (envoy#42438). Nothing here is ever shown in an error.
"""

from __future__ import annotations

from functools import lru_cache

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from envoy.extensions.transport_sockets.tls.v3 import secret_pb2

from mesh.model import Leaf, Roots, SnapshotError
from mesh.xds import names
from mesh.xds.pb import proto
from mesh.xds.resource_set import Resource, make


@lru_cache(maxsize=256)
def leaf(value: Leaf) -> Resource:
    """The secret `leaf`. Raises SnapshotError when certificate and key don't parse or don't match."""
    _check_pair(value)
    data = {
        "name": names.LEAF_SECRET,
        "tls_certificate": {
            "certificate_chain": {"inline_string": value.cert_pem},
            "private_key": {"inline_string": value.key_pem},
        },
    }
    return make(names.LEAF_SECRET, proto(secret_pb2.Secret, data))


@lru_cache(maxsize=16)
def roots(value: Roots) -> Resource:
    """The secret `roots`: all trusted roots together, old and new while they rotate."""
    if not value.pems:
        raise SnapshotError("Connect CA: no root certificate")
    bundle = "".join(pem if pem.endswith("\n") else pem + "\n" for pem in value.pems)
    data = {"name": names.ROOTS_SECRET, "validation_context": {"trusted_ca": {"inline_string": bundle}}}
    return make(names.ROOTS_SECRET, proto(secret_pb2.Secret, data))


def _check_pair(value: Leaf) -> None:
    try:
        cert = x509.load_pem_x509_certificate(value.cert_pem.encode())
        key = serialization.load_pem_private_key(value.key_pem.encode(), password=None)
    except ValueError as error:
        raise SnapshotError(f"leaf of {value.service}: certificate or key cannot be read") from error
    form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    if cert.public_key().public_bytes(*form) != key.public_key().public_bytes(*form):
        raise SnapshotError(f"leaf of {value.service}: the key does not belong to the certificate")
