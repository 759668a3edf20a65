"""One world of three regions for all end-to-end tests that don't need one of their own.

Law: started once per session, taken down at its end whatever happened; a test leaves it as it found it
(`calm` checks that and puts config/traffic/ back).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.e2e.mesh_world import MeshWorld, brought_up


@pytest.fixture(scope="session")
def three_regions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshWorld]:
    """Three regions, each with two stable instances and a canary; WEIR_TEST_SUBNET picks 127.N.r.x."""
    number = os.environ.get("WEIR_TEST_SUBNET", "120")
    with brought_up(tmp_path_factory.mktemp("mesh") / ".weir", "--subnet", number) as world:
        yield world


@pytest.fixture
def calm(three_regions: MeshWorld) -> Iterator[MeshWorld]:
    """The world with default traffic before the test and after it."""
    three_regions.reset()
    yield three_regions
    three_regions.reset()
