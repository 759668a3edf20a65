"""A certificate authority for one test: Connect-like leafs with SPIFFE ids, and a server certificate.

Law: keys live in memory and in the files a test asks for; nothing is shared between tests.
"""

from __future__ import annotations

import datetime as dt
import json
import ssl
from functools import cache
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from mesh.model import Leaf
from mesh.xds import names

TRUST_DOMAIN = "11111111-2222-3333-4444-555555555555.consul"

_LIFE = dt.timedelta(days=3)


class ThrowawayCa:
    """Signs leafs `spiffe://<trust domain>/ns/default/dc/<region>/svc/<service>`."""

    def __init__(self, trust_domain: str = TRUST_DOMAIN) -> None:
        self.trust_domain = trust_domain
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named("throw-away CA")
        self._cert = self._sign(self._key.public_key(), f"spiffe://{trust_domain}", ca=True)
        self.pem = _pem(self._cert)
        self.leaf = cache(self._leaf)

    def _leaf(self, service: str, region: str) -> Leaf:
        key = ec.generate_private_key(ec.SECP256R1())
        uri = names.spiffe(service, region, self.trust_domain)
        cert = self._sign(key.public_key(), uri, ca=False)
        return Leaf(service, _pem(cert), key_pem(key), uri, format(cert.serial_number, "x"))

    def client(self, service: str, region: str, folder: Path) -> ssl.SSLContext:
        """A TLS client that presents this leaf, and looks at no name (the test asks a sidecar by address)."""
        leaf = self.leaf(service, region)
        path = folder / f"client-{service}-{region}.pem"
        path.write_text(leaf.cert_pem + leaf.key_pem)
        context = ssl.create_default_context(cadata=self.pem)
        context.check_hostname = False
        context.load_cert_chain(path)
        return context

    def _sign(self, key: ec.EllipticCurvePublicKey, uri: str, *, ca: bool) -> x509.Certificate:
        now = dt.datetime.now(dt.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(self._name if ca else _named("leaf"))
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(minutes=5))
            .not_valid_after(now + _LIFE)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]), critical=True)
        )
        return builder.sign(self._key, hashes.SHA256())


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _pem(cert: x509.Certificate) -> str:
    return cert.public_bytes(serialization.Encoding.PEM).decode()


def key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()


def server_sds(folder: Path, *hosts: str) -> tuple[Path, ssl.SSLContext]:
    """An SDS file with a server certificate for these hosts, and a client context that trusts it."""
    ca = trustme.CA()
    cert = ca.issue_cert(*hosts)
    secret = {
        "@type": names.SECRET,
        "name": names.INGRESS_TLS_SECRET,
        "tls_certificate": {
            "certificate_chain": {
                "inline_string": b"".join(p.bytes() for p in cert.cert_chain_pems).decode()
            },
            "private_key": {"inline_string": cert.private_key_pem.bytes().decode()},
        },
    }
    path = folder / "ingress-tls.json"
    path.write_text(json.dumps({"resources": [secret]}))
    context = ssl.create_default_context()
    ca.configure_trust(context)
    return path, context
