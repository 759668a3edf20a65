"""One world of three regions for all end-to-end tests that don't need one of their own.

Law: started once per session, taken down at its end whatever happened; a test leaves it as it found it
(`calm` checks that and puts config/traffic/ back).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.mesh_world import MeshWorld, brought_up


@pytest.fixture(scope="session")
def three_regions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshWorld]:
    """Three regions with two stable instances and a canary each, 127.120.r.x."""
    with brought_up(tmp_path_factory.mktemp("mesh") / ".weir", "--subnet", "120") as world:
        yield world


@pytest.fixture
def calm(three_regions: MeshWorld) -> Iterator[MeshWorld]:
    """The world with default traffic before the test and after it."""
    three_regions.reset()
    yield three_regions
    three_regions.reset()
