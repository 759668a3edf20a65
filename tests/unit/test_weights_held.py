"""Weights as engines see them: the same tensors before and after every kind of sleep, and honest failures."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.held import held_of, least_growth

pytestmark = pytest.mark.torch
Opener = Callable[..., Any]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """About 3 MB in two shards; the user's cache is a folder of this test."""
    import torch

    from services.weights import sums
    from tests.weights_samples import random_tensors, save_sharded

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    save_sharded(folder, random_tensors(1, layers=4, width=300, dtypes=(torch.bfloat16,)), 2)
    sums.write(folder)
    return folder


def _host(folder: Path, **how: Any) -> Any:
    from services.weights.host import HostWeights

    return HostWeights(folder, "float32", how.pop("progress", None), park_from=how.pop("park_from", 0))


def _anonymous(folder: Path) -> Any:
    return _host(folder, park_from=1 << 40)


def _device(folder: Path) -> Any:
    from services.weights.device import DeviceWeights

    return DeviceWeights(folder, "cpu", "float32")


def _copies(weights: Any) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in weights.tensors.items()}


def _same(weights: Any, wanted: dict[str, Any]) -> bool:
    import torch

    return weights.tensors.keys() == wanted.keys() and all(
        torch.equal(tensor, wanted[name]) for name, tensor in weights.tensors.items()
    )


@pytest.mark.parametrize("opened", [_host, _anonymous, _device])
def test_sleep_gives_memory_back_and_waking_brings_the_same(model: Path, opened: Opener) -> None:
    weights = opened(model)
    assert weights.resident_bytes() >= weights.nbytes
    wanted, objects = _copies(weights), dict(weights.tensors)
    assert weights.nbytes == sum(t.nbytes for t in wanted.values())
    for sleep, wake in (("park", "unpark"), ("drop", "reload"), ("drop", "unpark"), ("park", "reload")):
        getattr(weights, sleep)()
        getattr(weights, sleep)()
        assert weights.resident_bytes() <= 0.1 * weights.nbytes
        getattr(weights, wake)()
        getattr(weights, wake)()
        assert weights.resident_bytes() >= weights.nbytes
        assert _same(weights, wanted)
        assert all(weights.tensors[name] is tensor for name, tensor in objects.items())
    weights.close()
    weights.close()
    assert weights.resident_bytes() == 0


def test_what_was_measured_before_a_change_is_not_told_after_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metrics ask in one thread while the engine's own parks."""
    weights = _host(model)
    real = weights._arena.resident_bytes

    def overtaken() -> int:
        found = real()
        weights.park()
        return int(found)

    with monkeypatch.context() as patch:
        patch.setattr(weights._arena, "resident_bytes", overtaken)
        assert weights.resident_bytes() >= weights.nbytes
    assert weights.resident_bytes() <= 0.1 * weights.nbytes


@pytest.mark.parametrize("opened", [_host, _device])
def test_a_hundred_cycles_leak_nothing(model: Path, opened: Opener) -> None:
    weights, me = opened(model), psutil.Process()
    wanted = _copies(weights)

    def cycles(count: int) -> int:
        for _ in range(count):
            weights.park()
            weights.unpark()
        gc.collect()
        return me.memory_info().rss

    # The C library's heap needs some cycles to reach its size.
    before, held = cycles(40), held_of(model.parent)
    assert least_growth([before, *(cycles(35) for _ in range(3))]) <= weights.nbytes / 2
    assert held_of(model.parent) == held
    assert _same(weights, wanted)


def test_the_second_start_maps_the_file_of_the_first(model: Path) -> None:
    first = _host(model)
    seen: list[tuple[int, int]] = []
    second = _host(model, progress=lambda done, total: seen.append((done, total)))
    assert (first.report.source, second.report.source) == ("shards", "parked file")
    assert first.report.checked
    assert second.report.checked
    assert seen[-1][0] == seen[-1][1]
    assert _same(second, _copies(first))
    # What one of them writes is nobody else's: copy on write.
    second.tensors["lm_head.weight"].zero_()
    assert not _same(first, _copies(second))


@pytest.mark.parametrize("damage", ["flip", "truncate", "sums"])
def test_a_damaged_parked_file_is_written_again(
    model: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    weights = _host(model)
    wanted = _copies(weights)
    (path,) = (model.parent / "cache" / "weir" / "parked").glob("*.weights")
    weights.close()
    if damage == "sums":
        path.with_suffix(".sum").write_text("{")
    else:
        data = bytearray(path.read_bytes())
        data[-200] ^= 1
        path.write_bytes(data if damage == "flip" else data[:-5000])
    again = _host(model)
    assert again.report.source == "shards"
    assert "writing them again" in caplog.text
    assert _same(again, wanted)
    assert _host(model).report.source == "parked file"


def test_another_dtype_or_changed_shards_get_another_file(model: Path) -> None:
    from services.weights.host import HostWeights

    _host(model).close()
    HostWeights(model, "bfloat16", park_from=0).close()
    for path in model.glob("*.safetensors"):
        os.utime(path, (1, 1))
    changed = _host(model)
    assert changed.report.source == "shards"
    assert len(list((model.parent / "cache" / "weir" / "parked").glob("*.weights"))) == 3


def test_a_corrupt_shard_leaves_nothing_in_the_cache(model: Path) -> None:
    from services.weights.faults import WeightsError

    shard = sorted(model.glob("*.safetensors"))[1]
    data = bytearray(shard.read_bytes())
    data[-3000] ^= 1
    shard.write_bytes(data)
    with pytest.raises(WeightsError, match=f"shard {shard.name}: tensor"):
        _host(model)
    assert [p.name for p in (model.parent / "cache" / "weir" / "parked").iterdir()] == ["lock"]


def test_without_a_cache_the_weights_are_read_again(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    (model.parent / "cache").write_text("no folder")
    weights = _host(model)
    wanted = _copies(weights)
    assert "waking will read the shards again" in caplog.text
    weights.park()
    assert weights.resident_bytes() <= 0.1 * weights.nbytes
    weights.unpark()
    assert _same(weights, wanted)


def test_a_full_disk_is_no_reason_not_to_start(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: memoryview, offset: int) -> int:
        return len(data) // 2

    monkeypatch.setattr(os, "pwrite", full)
    weights = _host(model)
    assert weights.report.source == "shards"
    assert [p.name for p in (model.parent / "cache" / "weir" / "parked").iterdir()] == ["lock"]


def test_waking_from_a_file_that_was_cut_off_fails_and_stays_asleep(model: Path) -> None:
    from services.faults import WakeFailed

    weights = _host(model)
    wanted = _copies(weights)
    weights.park()
    (path,) = (model.parent / "cache" / "weir" / "parked").glob("*.weights")
    data = path.read_bytes()
    os.truncate(path, 1000)
    for wake in (weights.unpark, weights.reload):
        with pytest.raises(WakeFailed, match="can't be brought back"):
            wake()
        assert weights.resident_bytes() <= 0.1 * weights.nbytes
    path.write_bytes(data)
    weights.reload()
    assert _same(weights, wanted)


def test_weights_that_came_half_are_given_back(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stopped them: what is held passes for whole."""
    weights = _device(model)
    wanted = _copies(weights)
    weights.drop()

    def breaks(_: object) -> object:
        weights.tensors["lm_head.weight"].fill_(1)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(weights, "_read", breaks)
        with pytest.raises(MemoryError):
            weights.unpark()
    assert weights.resident_bytes() == 0
    weights.unpark()
    assert _same(weights, wanted)


def test_level_2_finds_a_changed_file(model: Path) -> None:
    from services.faults import WakeFailed

    weights = _host(model)
    weights.drop()
    (path,) = (model.parent / "cache" / "weir" / "parked").glob("*.weights")
    with path.open("r+b") as file:
        file.write(b"other bytes than these")
    with pytest.raises(WakeFailed, match="changed on disk"):
        weights.reload()


def test_the_cache_stays_under_its_limit_and_spares_what_is_in_use(tmp_path: Path) -> None:
    from services.weights.parked import Cache

    cache = Cache(tmp_path / "parked", limit=250_000)
    held = []
    with cache.writing():
        for number in range(4):
            parked = cache.write(f"m{number}", 100_000, lambda arena: None)
            os.utime(tmp_path / "parked" / f"m{number}.weights", (number, number))
            if number == 0:
                held.append(parked)
            else:
                parked.close()
    # m0 is the oldest, and in use; m1 and m2 went to make room.
    assert sorted(p.name for p in (tmp_path / "parked").glob("*.weights")) == ["m0.weights", "m3.weights"]
    assert not (tmp_path / "parked" / "m1.sum").exists()
    held[0].close()
    assert cache.find("m1", 100_000) is None
    assert cache.find("m3", 50_000) is None


def test_what_a_dead_writer_left_is_removed(tmp_path: Path) -> None:
    from services.weights.parked import Cache

    (tmp_path / "old.writing").write_bytes(b"half")
    with Cache(tmp_path).writing():
        assert not (tmp_path / "old.writing").exists()


def test_the_limit_comes_from_the_environment() -> None:
    from services.weights.parked import LIMIT, limit

    assert limit({}) == LIMIT
    assert limit({"WEIR_PARKED_LIMIT_GIB": "0.5"}) == 1 << 29


@pytest.mark.parametrize(("device", "dtype"), [("tpu", "float32"), ("cpu", "int4")])
def test_devices_and_dtypes_that_there_are_not(model: Path, device: str, dtype: str) -> None:
    from regions.cli.errors import UsageError
    from services.weights import open_weights

    with pytest.raises(UsageError):
        open_weights(model, device=device, dtype=dtype)


def test_where_the_kernel_doesnt_tell_the_size_is_reported(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from services.weights import pages

    def nobody(address: int, nbytes: int) -> int:
        raise FileNotFoundError("/proc/self/pagemap")

    monkeypatch.setattr(pages, "resident", nobody)
    weights = _host(model)
    assert weights.resident_bytes() >= weights.nbytes
    weights.park()
    assert weights.resident_bytes() == 0


def test_small_weights_get_no_file(model: Path) -> None:
    from services.weights import open_weights

    open_weights(model).close()
    assert not (model.parent / "cache" / "weir" / "parked").exists()


def test_importing_the_package_or_its_pure_parts_imports_no_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys, services.weights, services.weights.plan, services.weights.layout\n"
        "import services.models.store, services.models.cli, services.models.prepare\n"
        "assert not {'torch', 'safetensors', 'numpy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=250)
