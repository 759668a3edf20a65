"""The ingress certificate of a local world: a given one, or one of our own making, and its SDS file.

Law: makes and checks certificates and gives bytes back; `write_all` alone touches the disk. The private
key goes to an Envoy through a file and never passes a control plane.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from mesh.world import files
from mesh.world.layout import WorldLayout
from mesh.xds import names
from regions.cli.errors import UsageError

CA_LIFE, LEAF_LIFE = dt.timedelta(days=3650), dt.timedelta(days=397)
RENEW_BEFORE = dt.timedelta(days=14)
DNS_NAMES = ("localhost", "*.weir.test", "weir.test", "chat.localhost")


@dataclass(frozen=True, slots=True)
class Bundle:
    """PEM texts. ca_pem: what clients trust. chain_pem: leaf first."""

    ca_pem: str
    chain_pem: str
    key_pem: str = field(repr=False)


def self_made(addresses: Sequence[str], now: dt.datetime) -> Bundle:
    """A CA and an ingress certificate under it, for these IP addresses and DNS_NAMES. `now` is aware, UTC."""
    ca_key, leaf_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "weir local world CA")])
    ca = _sign(_ca(ca_name, ca_key.public_key(), now), ca_key)
    leaf = _sign(_leaf(ca_name, ca_key.public_key(), leaf_key.public_key(), addresses, now), ca_key)
    return Bundle(ca_pem=_pem(ca), chain_pem=_pem(leaf), key_pem=_key_pem(leaf_key))


def _ca(name: x509.Name, key: ec.EllipticCurvePublicKey, now: dt.datetime) -> x509.CertificateBuilder:
    usage = x509.KeyUsage(
        key_cert_sign=True,
        crl_sign=True,
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        _base(name, key, now, CA_LIFE)
        .issuer_name(name)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _leaf(
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePublicKey,
    key: ec.EllipticCurvePublicKey,
    addresses: Sequence[str],
    now: dt.datetime,
) -> x509.CertificateBuilder:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "weir ingress")])
    sans: list[x509.GeneralName] = [x509.DNSName(n) for n in DNS_NAMES]
    sans += [x509.IPAddress(ipaddress.ip_address(a)) for a in addresses]
    return (
        _base(subject, key, now, LEAF_LIFE)
        .issuer_name(issuer)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(sans), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
    )


def _base(
    subject: x509.Name, key: ec.EllipticCurvePublicKey, now: dt.datetime, life: dt.timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        # A day back: a clock that was set back a little must not make a new world unreachable.
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + life)
    )


def _sign(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    return builder.sign(key, hashes.SHA256())


def _pem(cert: x509.Certificate) -> str:
    return cert.public_bytes(serialization.Encoding.PEM).decode()


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()


def given(cert: Path, key: Path) -> Bundle:
    """A chain and key of the user's. Raises UsageError when they can't be read or don't belong together."""
    try:
        chain_pem, key_pem = cert.read_text(), key.read_text()
        chain = x509.load_pem_x509_certificates(chain_pem.encode())
        private = serialization.load_pem_private_key(key_pem.encode(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(
            f"--tls-cert {cert} --tls-key {key}",
            f"not a readable PEM pair: {error}",
            "give a PEM certificate chain, leaf first, and its PEM key without a password",
        ) from error
    if chain[0].public_key() != private.public_key():
        raise UsageError(f"--tls-key {key}", f"isn't the key of {cert}", "give its own key")
    # The last of the chain is what a client can trust: an issuer when given, else the leaf itself.
    return Bundle(ca_pem=_pem(chain[-1]), chain_pem=chain_pem, key_pem=key_pem)


def usable(bundle: Bundle, addresses: Sequence[str], now: dt.datetime) -> bool:
    """Whether a self-made bundle still covers all addresses and lives longer than RENEW_BEFORE."""
    try:
        leaf = x509.load_pem_x509_certificate(bundle.chain_pem.encode())
        covered = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        return False
    have = {str(a) for a in covered.get_values_for_type(x509.IPAddress)}
    return set(addresses) <= have and leaf.not_valid_after_utc - now > RENEW_BEFORE


def sds(bundle: Bundle) -> str:
    """The SDS file an ingress Envoy watches: a DiscoveryResponse with one TLS certificate, as JSON."""
    secret = {
        "@type": names.SECRET,
        "name": names.INGRESS_TLS_SECRET,
        "tls_certificate": {
            "certificate_chain": {"inline_string": bundle.chain_pem},
            "private_key": {"inline_string": bundle.key_pem},
        },
    }
    return json.dumps({"resources": [secret]}, indent=1)


def write_all(where: WorldLayout, bundle: Bundle) -> None:
    """Put the bundle under <world>/tls. Keys are 0600; files are replaced whole, as Envoy's watch wants."""
    files.private_folder(where.tls)
    files.write(where.tls / "cert.pem", bundle.chain_pem)
    files.write(where.tls / "key.pem", bundle.key_pem, mode=0o600)
    files.write(where.ca_file, bundle.ca_pem)
    files.write(where.ingress_sds, sds(bundle), mode=0o600)


def load(where: WorldLayout) -> Bundle | None:
    """The bundle that `write_all` left, or None when any part is missing."""
    try:
        return Bundle(
            ca_pem=where.ca_file.read_text(),
            chain_pem=(where.tls / "cert.pem").read_text(),
            key_pem=(where.tls / "key.pem").read_text(),
        )
    except FileNotFoundError:
        return None
