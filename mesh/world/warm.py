"""Ready as a request sees it: every ingress has found every host of its clusters healthy.

Law: asks the admin pages and waits, bounded. Why: an ingress looks at idle hosts once a second and believes
the second good answer, so for some two seconds after the last process is ready a stage would still be passed
over (measured: the first 1,500 canary requests of a new world were 109 short).
"""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections.abc import Sequence

from mesh.world import patience
from mesh.world.world import World

PATIENCE_S = 15.0
_FLAGS = re.compile(r"^(\S+?)::(\S+?)::health_flags::(.*)$", re.MULTILINE)


def cold(page: str) -> tuple[str, ...]:
    """Hosts that an Envoy's `/clusters` page calls anything but healthy, as `cluster host: flags`."""
    return tuple(f"{c} {host}: {flags}" for c, host, flags in _FLAGS.findall(page) if flags != "healthy")


def wait(world: World, regions: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Until the ingresses of these regions are warm, PATIENCE_S at most. What is still cold, by region."""
    left: dict[str, tuple[str, ...]] = dict.fromkeys(regions, ())

    def warm() -> bool:
        left.update({name: _look(world, name) for name in regions})
        return not any(left.values())

    patience.until(warm, PATIENCE_S)
    return {name: hosts for name, hosts in left.items() if hosts}


def _look(world: World, region: str) -> tuple[str, ...]:
    try:
        with urllib.request.urlopen(world.address(region).ingress_admin + "/clusters", timeout=2) as answer:  # noqa: S310
            return cold(answer.read().decode(errors="replace"))
    except (urllib.error.URLError, OSError) as error:
        return (f"ingress admin: {error}",)
