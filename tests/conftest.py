"""What every test may ask for: goldens (tests/goldens.py).

Law: no process, no port, no folder is made here unless a test asks for the fixture that owns it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.goldens import FOLDER, Goldens

# No test fails because the machine is busy: neither by a slow example nor by slow drawing. In CI the examples
# are the same each time (a change is judged by what it changed); at a desk they are new ones each time, which
# is where a property that is nearly true gets found.
settings.register_profile(
    "weir",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="WEIR_SAME_EXAMPLES" in os.environ,
)
settings.load_profile("weir")

# A shell without job control starts what it puts in the background with SIGINT ignored, and children inherit
# that: the tests of Ctrl-C would wait in vain for the end of a process that never hears it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-goldens", action="store_true", help="write tests/golden/ anew instead of comparing with it"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)`: fails with a diff unless tests/golden/<name> is exactly `text`."""
    return Goldens(FOLDER, bool(request.config.getoption("--update-goldens"))).check


@pytest.fixture
def golden_json(request: pytest.FixtureRequest) -> Callable[[str, Any], None]:
    """`golden_json(name, value)`: the same for JSON, with sorted keys."""
    return Goldens(FOLDER, bool(request.config.getoption("--update-goldens"))).check_json
