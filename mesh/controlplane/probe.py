"""Probe the way to another region: a TLS handshake through its mesh gateway down to a sidecar.

Law: measures and nothing else; mesh.controlplane.path makes a verdict of it. It looks at the path, not at the
catalog: a gateway that died with its region still stands in Consul as healthy (hashicorp/consul#9811).
"""

from __future__ import annotations

import asyncio
import os
import ssl
from dataclasses import dataclass

from mesh.model import Leaf, Roots

TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Target:
    """Where to knock: the gateway's address and the SNI of some healthy (service, stage) behind it."""

    region: str
    address: str
    port: int
    sni: str


def context(roots: Roots, leaf: Leaf) -> ssl.SSLContext:
    """A client context with our leaf; the key goes through a memory file and never to a disk."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname = False  # a SPIFFE id is a URI, not a host name; the chain is what proves the mesh
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_verify_locations(cadata="\n".join(roots.pems))
    handle = os.memfd_create("weir-leaf", os.MFD_CLOEXEC)
    try:
        os.write(handle, f"{leaf.cert_pem}\n{leaf.key_pem}\n".encode())
        made.load_cert_chain(f"/proc/self/fd/{handle}")
    finally:
        os.close(handle)
    return made


async def knock(target: Target, tls: ssl.SSLContext, source: str = "", timeout_s: float = TIMEOUT_S) -> str:
    """An empty text when the handshake came through, else the reason in words. source: address to bind."""
    try:
        async with asyncio.timeout(timeout_s):
            local = (source, 0) if source else None
            _, writer = await asyncio.open_connection(
                target.address, target.port, ssl=tls, server_hostname=target.sni, local_addr=local
            )
    except TimeoutError:
        return f"no handshake within {timeout_s:g} s"
    except (OSError, ssl.SSLError) as error:
        return f"{type(error).__name__}: {error}"
    writer.transport.abort()
    return ""
