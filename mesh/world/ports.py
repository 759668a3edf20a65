"""Which addresses are free, who holds one that isn't, and which world number to take.

Law: asks the kernel by binding for a moment; starts nothing and keeps nothing but a Claim.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from mesh.world.addresses import CONSUL_LAN, CONSUL_WAN, FIRST_WORLD, LAST_WORLD, Listener, RegionAddresses
from regions.cli.errors import WeirError

_CLAIM_PORT = 8500
"""Of 127.<world>.0.1, an address no part uses (regions begin at 1)."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A listener that can't be had. holder: for people, e.g. `consul (process 4711)`."""

    listener: Listener
    holder: str


class PortTaken(WeirError):
    """An address and port the world needs is held by somebody else."""


def free(listener: Listener) -> bool:
    """Whether the address can be bound now (TCP, for gossip UDP too). Raises WeirError when it never can."""
    kinds = [socket.SOCK_STREAM]
    if listener.port in (CONSUL_LAN, CONSUL_WAN):
        kinds.append(socket.SOCK_DGRAM)
    return all(_binds(listener, kind) for kind in kinds)


def _binds(listener: Listener, kind: socket.SocketKind) -> bool:
    with socket.socket(socket.AF_INET, kind) as probe:
        if kind is socket.SOCK_STREAM:
            # So that closed connections still in TIME_WAIT don't count; a listener does.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((listener.host, listener.port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise WeirError(
                f"{listener} ({listener.what})", f"can't be bound: {error.strerror}", "weir needs 127.0.0.0/8"
            ) from error
    return True


def taken(listeners: Iterable[Listener]) -> tuple[Taken, ...]:
    """Those that can't be had, with who holds them."""
    busy = [each for each in listeners if not free(each)]
    return tuple(Taken(each, _holder(each)) for each in busy)


def refuse_taken(listeners: Iterable[Listener], number: int) -> None:
    """Raise PortTaken naming address, port and holder of the first that is taken."""
    if found := taken(listeners):
        first, more = found[0], len(found) - 1
        also = f" (and {more} more of this world's ports)" if more else ""
        raise PortTaken(
            f"{first.listener}, needed for {first.listener.what}",
            f"already taken by {first.holder}{also}",
            f"stop that process, or take another world number than {number} with --subnet",
        )


def _holder(listener: Listener) -> str:
    with contextlib.suppress(psutil.Error):
        for row in psutil.net_connections("inet"):
            bound = row.laddr
            if not bound or bound.port != listener.port or row.pid is None:
                continue
            if bound.ip in (listener.host, "0.0.0.0", "::") and row.status in ("LISTEN", "NONE"):  # noqa: S104
                return f"{psutil.Process(row.pid).name()} (process {row.pid})"
    return "another process (whose, only root can see)"


@contextmanager
def claimed(number: int) -> Iterator[bool]:
    """Claim a world number against other `weir up` for the length of the block; yields whether it was got."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as claim:
        try:
            claim.bind((f"127.{number}.0.1", _CLAIM_PORT))
        except OSError:
            yield False
            return
        yield True


@contextmanager
def chosen(wanted: int | None, regions: int, instances: int, *, http: bool) -> Iterator[int]:
    """A world number of which every listener is free, claimed for the length of the block.

    wanted: take exactly this one. Raises PortTaken when it isn't free, or none is.
    """
    for number in range(FIRST_WORLD, LAST_WORLD + 1) if wanted is None else (wanted,):
        with claimed(number) as got:
            if not got:
                continue
            needed = all_listeners(number, regions, instances, http=http)
            if wanted is not None:
                refuse_taken(needed, number)
            elif not all(map(free, needed)):
                continue
            yield number
            return
    raise PortTaken(
        f"world number {wanted}" if wanted is not None else "world number",
        "another `weir up` is taking it just now" if wanted is not None else "none is free",
        "stop a world that you don't need (weir down)",
    )


def all_listeners(number: int, regions: int, instances: int, *, http: bool) -> tuple[Listener, ...]:
    """Every listener of a world of `regions` regions."""
    return tuple(
        each
        for index in range(1, regions + 1)
        for each in RegionAddresses(number, index).listeners(instances, http=http)
    )
