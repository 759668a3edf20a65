"""GPUDirect by way of fastsafetensors: a stand-in library with the calls of 0.5.0, on the CPU.

The stand-in keeps the real one's order: files are registered, then copied, and a loader that is closed is
closed for good. That the real library (nogds, device cpu) gives the same was tried by hand.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.torch


class Loader:
    """SafeTensorsFileLoader."""

    made: list[Loader] = []  # noqa: RUF012 (reset by the fixture)
    broken = ""

    def __init__(self, group: object, device: str, nogds: bool) -> None:
        self.device, self.nogds, self.files, self.closed = device, nogds, list[str](), False
        Loader.made.append(self)

    def add_filenames(self, filenames: dict[int, list[str]]) -> None:
        self.files += filenames[0]

    def copy_files_to_device(self) -> Any:
        from safetensors.torch import load_file

        assert self.files
        assert not self.closed
        if self.broken:
            raise RuntimeError(self.broken)
        tensors = {name: tensor for path in self.files for name, tensor in load_file(path).items()}
        return SimpleNamespace(get_tensor=lambda name: tensors[name], close=lambda: None)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> type[Loader]:
    module = ModuleType("fastsafetensors")
    module.SafeTensorsFileLoader = Loader  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fastsafetensors", module)
    monkeypatch.setattr(Loader, "made", [])
    monkeypatch.setattr(Loader, "broken", "")
    return Loader


def _model(folder: Path) -> dict[str, Any]:
    from services.weights import sums
    from tests.weights_samples import random_tensors, save_sharded

    tensors = random_tensors(3)
    save_sharded(folder, tensors, 2)
    sums.write(folder)
    return tensors


def _load(folder: Path) -> tuple[dict[str, Any], Any]:
    import torch

    from mesh.clock import SystemClock
    from services.weights import gpudirect
    from services.weights.arena import HostArena
    from services.weights.folder import read_folder
    from services.weights.host import views
    from services.weights.layout import layout

    found = read_folder(folder)
    plan = layout(found.facts, "F32")
    tensors = views(HostArena(plan.size), plan)
    device = torch.device("cpu")
    return tensors, gpudirect.load(found, tensors, device, None, SystemClock(), gds=False)


def test_it_gives_the_same_and_checks_it(tmp_path: Path, library: type[Loader]) -> None:
    import torch

    wanted = _model(tmp_path)
    found, report = _load(tmp_path)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor.to(found[name].dtype))
    assert (report.source, report.checked) == ("gpudirect", True)
    assert [len(loader.files) for loader in library.made] == [1, 1]
    assert all(loader.closed for loader in library.made)


def test_a_flipped_bit_is_found_on_this_way_too(tmp_path: Path, library: type[Loader]) -> None:
    from services.weights.faults import WeightsError

    _model(tmp_path)
    path = sorted(tmp_path.glob("*.safetensors"))[1]
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightsError, match=f"shard {path.name}: tensor"):
        _load(tmp_path)


def test_a_library_that_cant_says_so(tmp_path: Path, library: type[Loader]) -> None:
    from services.weights.gpudirect import Unusable

    _model(tmp_path)
    library.broken = "cuFile: no such device"
    with pytest.raises(Unusable, match="cuFile: no such device"):
        _load(tmp_path)
    assert all(loader.closed for loader in library.made)


def test_without_library_or_gpu_it_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from services.weights import gpudirect

    monkeypatch.setattr(gpudirect, "LIBRARY", "no_such_library")
    assert not gpudirect.usable()
