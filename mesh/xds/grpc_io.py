"""Small gRPC duties that ADS and LRS share: options, the first message, the socket on disk.

Law: shell; knows nothing of xDS.
"""

from __future__ import annotations

import asyncio
import socket
import stat
from pathlib import Path
from typing import Any

import grpc

from regions.cli.errors import WeirError

MAX_RECEIVE = 16 << 20
"""Bytes. grpcio allows 4 MiB; a reconnecting ingress may tell versions of tens of thousands of resources."""

OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", MAX_RECEIVE),
    ("grpc.max_send_message_length", -1),
    # Both sides ping: a half-open connection is found within 35 s from either end.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # grpcio's own limit is one ping in 300 s, then GOAWAY too_many_pings; Envoy pings each 30 s.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
)

MAX_SOCKET_PATH = 100
"""Bytes; Linux has room for 107 and Envoy for no more."""


async def first_message(context: Any, within_s: float) -> Any:
    """The first message of a stream; whoever only holds a stream open is sent away."""
    try:
        return await asyncio.wait_for(context.read(), within_s)
    except TimeoutError:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no request within {within_s:g} s")


def prepare_socket(path: Path) -> None:
    """Make the folder private, and the path free. Raises WeirError when somebody serves there or may look
    in."""
    if len(str(path).encode()) > MAX_SOCKET_PATH:
        raise WeirError(
            str(path), f"socket path is longer than {MAX_SOCKET_PATH} bytes", "use a shorter folder"
        )
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = stat.S_IMODE(path.parent.stat().st_mode)
    if mode & 0o077:
        raise WeirError(
            str(path.parent), f"others may enter this folder (mode {mode:o})", f"chmod 700 {path.parent}"
        )
    if not path.exists():
        return
    if answers(path):
        raise WeirError(str(path), "another control plane serves here", "stop it, or use another socket")
    path.unlink()


def answers(path: Path) -> bool:
    """Whether anybody accepts connections on this Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True
