"""Devices: one contract for fakes, the CPU and NVML; NVML's errors, MIG, loss."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from regions.cli.errors import UsageError, WeirError
from services.devices import cli, here
from services.devices.door import Devices, find, places
from services.devices.fake import FakeDevices
from services.devices.host import HostDevices, memory
from services.devices.nvml import NoGpu, NvmlDevices
from services.faults import DeviceLost
from tests.fakes.pynvml_recorded import GIB, RecordedNvml, cut, h200

KINDS: dict[str, Callable[[], Devices]] = {
    "fake": FakeDevices,
    "host": HostDevices,
    "nvml": lambda: NvmlDevices(RecordedNvml(h200(1), h200(2, busy=97, used=100 * GIB), cut(3))),
}


@pytest.fixture(params=KINDS)
def devices(request: pytest.FixtureRequest) -> Devices:
    return KINDS[request.param]()


def test_every_device_says_who_it_is_how_large_and_how_busy(devices: Devices) -> None:
    assert isinstance(devices, Devices)
    seen = devices.list()
    assert seen
    assert [d.index for d in seen] == sorted({d.index for d in seen})
    assert len({d.uuid for d in places(seen)}) == len(places(seen)), "names are unique on a host"
    for device in (*seen, *places(seen)):
        assert device.uuid
        assert device.name
        assert 0 <= device.memory_used <= device.memory_total
        assert device.memory_total > 0
        assert device.memory_free + device.memory_used == device.memory_total
        assert 0.0 <= device.load <= 1.0


def test_every_place_can_be_bound_to_and_nothing_else(devices: Devices) -> None:
    for device in places(devices.list()):
        binding = devices.bind(device.uuid)
        assert binding.uuid == device.uuid
        assert binding.torch == "cpu" or binding.torch.startswith("cuda:")
        assert "CUDA_VISIBLE_DEVICES" in binding.environment
        assert find(devices.list(), device.uuid) is not None
    with pytest.raises(UsageError, match="unknown on this host"):
        devices.bind("GPU-of-another-machine")


def test_it_may_be_closed_twice(devices: Devices) -> None:
    devices.close()
    devices.close()


def test_a_gpu_cut_into_slices_is_bound_to_by_slice_only() -> None:
    found = NvmlDevices(RecordedNvml(h200(1), cut(3)))
    whole = found.list()[1]
    assert [(s.name, s.memory_total) for s in whole.slices] == [("3g.71gb", 71 * GIB), ("1g.18gb", 17 * GIB)]
    assert whole.utilisation is None
    assert whole.slices[0].processes[0].pid == 4321
    with pytest.raises(UsageError, match="MIG-3-a, MIG-3-b"):
        found.bind(whole.uuid)
    bound = found.bind("MIG-3-b")
    assert (bound.environment["CUDA_VISIBLE_DEVICES"], bound.torch) == ("MIG-3-b", "cuda:0")


@pytest.mark.parametrize("code", [9, 12])
def test_no_library_or_no_driver_is_no_gpu_and_no_crash(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = RecordedNvml()
    nvml.fail[("nvmlInit", "")] = code
    with pytest.raises(NoGpu, match="NVML"):
        NvmlDevices(nvml)
    monkeypatch.setattr(here, "NvmlDevices", lambda **_: NvmlDevices(nvml))
    assert here.devices().kind == "host"
    with pytest.raises(NoGpu):
        here.devices("gpu")


def test_the_roomiest_gpu_is_where_an_engine_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = RecordedNvml(h200(1, used=90 * GIB), h200(2), h200(3))
    monkeypatch.setattr(here, "NvmlDevices", lambda **how: NvmlDevices(nvml, **how))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert here.at_start("", gpu=True)[1].torch == "cuda:1"
    assert here.at_start("", gpu=False)[1].uuid == "cpu"
    assert here.at_start("cpu", gpu=True)[1].uuid == "cpu"
    assert here.at_start("cuda:2", gpu=True)[1].uuid == h200(3).uuid
    assert here.at_start("cuda", gpu=True)[1].uuid == h200(1).uuid
    with pytest.raises(UsageError, match="cuda:7"):
        here.at_start("cuda:7", gpu=True)
    assert here.at_start(h200(3).uuid, gpu=True)[1].uuid == h200(3).uuid
    with pytest.raises(UsageError):
        here.at_start("GPU-x", gpu=True)


@pytest.mark.parametrize(
    ("allowed", "numbers"),
    [
        (None, [1, 2, 3]),
        ("2,0", [3, 1]),
        (h200(2).uuid, [2]),
        ("GPU-5d6f0c1e", []),  # names more than one
        ("1,7,2", [2]),
        ("1,1", [2]),
        ("", []),
        ("-1", []),
        (" 1 , 2", [2, 3]),
    ],
)
def test_what_this_process_may_not_see_is_not_there(
    allowed: str | None, numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = NvmlDevices(RecordedNvml(h200(1), h200(2), h200(3)), allowed=allowed)
    assert [d.uuid for d in found.list()] == [h200(n).uuid for n in numbers]
    for number, device in enumerate(found.list()):
        assert found.bind(device.uuid).torch == f"cuda:{number}"
    if not numbers:
        monkeypatch.setattr(here, "NvmlDevices", lambda **_: found)
        assert here.at_start("", gpu=True)[1].uuid == "cpu"


def test_who_may_see_one_slice_sees_no_other() -> None:
    found = NvmlDevices(RecordedNvml(h200(1), cut(3)), allowed="MIG-3-b")
    assert [d.uuid for d in places(found.list())] == ["MIG-3-b"]


@pytest.mark.parametrize("code", [15, 16, 999])
def test_a_gpu_that_fell_off_the_bus_is_left_out_and_lost_to_who_wants_it(code: int) -> None:
    nvml = RecordedNvml(h200(1), h200(2))
    found = NvmlDevices(nvml)
    nvml.fail[("*", h200(1).uuid)] = code
    assert [d.uuid for d in found.list()] == [h200(2).uuid]
    with pytest.raises(DeviceLost, match="fallen off"):
        found.bind(h200(1).uuid)
    assert found.bind(h200(2).uuid).torch == "cuda:1", "its number doesn't change by another's loss"


@pytest.mark.parametrize(
    ("function", "code"),
    [
        ("nvmlDeviceGetUtilizationRates", 3),
        ("nvmlDeviceGetMigMode", 3),
        ("nvmlDeviceGetMigMode", 13),
        ("nvmlDeviceGetComputeRunningProcesses", 4),
    ],
)
def test_what_a_gpu_can_not_tell_is_left_out(function: str, code: int) -> None:
    nvml = RecordedNvml(h200(1, busy=50))
    nvml.fail[(function, "")] = code
    [device] = NvmlDevices(nvml).list()
    assert device.memory_total > 0
    assert device.slices == ()


def test_memory_that_the_driver_does_not_tell_per_process_is_zero() -> None:
    [device] = NvmlDevices(RecordedNvml(h200(1, processes=[(77, None)]))).list()
    assert [(p.pid, p.memory) for p in device.processes] == [(77, 0)]


def test_whatever_else_nvml_says_is_an_error_for_people() -> None:
    nvml = RecordedNvml(h200(1))
    nvml.fail[("nvmlDeviceGetMemoryInfo", "")] = 4
    with pytest.raises(WeirError, match="nvmlDeviceGetMemoryInfo"):
        NvmlDevices(nvml).list()


def test_nothing_of_a_gpu_is_ever_set() -> None:
    nvml = RecordedNvml(h200(1), cut(3))
    found = NvmlDevices(nvml)
    found.list()
    found.bind("MIG-3-a")
    found.close()
    assert nvml.open == 0
    assert not [name for name in nvml.calls if "Set" in name or "Reset" in name]


@pytest.mark.torch
def test_names_match_the_real_module() -> None:
    """The stand-in has only functions that pynvml has, so that a typo in both can't pass."""
    pynvml = import_module("pynvml")
    ours = [name for name in dir(RecordedNvml) if name.startswith("nvml")]
    assert len(ours) >= 11
    assert [name for name in ours if not callable(getattr(pynvml, name, None))] == []
    codes = {"NOT_SUPPORTED": 3, "NO_PERMISSION": 4, "NOT_FOUND": 6, "DRIVER_NOT_LOADED": 9}
    codes |= {"LIBRARY_NOT_FOUND": 12, "FUNCTION_NOT_FOUND": 13, "GPU_IS_LOST": 15, "RESET_REQUIRED": 16}
    assert {n: getattr(pynvml, f"NVML_ERROR_{n}") for n in codes} == codes


@given(st.integers(0, 1000), st.integers(1, 8))
def test_the_same_seed_gives_the_same_devices(seed: int, count: int) -> None:
    assert FakeDevices(seed, count).list() == FakeDevices(seed, count).list()
    assert len(FakeDevices(seed, count).list()) == count


def test_a_fake_is_loaded_filled_cut_and_lost_on_order() -> None:
    found = FakeDevices(seed=1, count=2)
    a, b = (d.uuid for d in found.list())
    found.set_load(a, 0.9)
    found.set_used(a, 5)
    found.take(a, 7, pid=42)
    device = find(found.list(), a)
    assert device is not None
    assert (device.load, device.memory_used) == (0.9, 12)
    assert [(p.pid, p.memory) for p in device.processes] == [(42, 7)]
    found.cut(b, 4)
    assert len(places(found.list())) == 5
    found.lose(a)
    assert len(found.list()) == 1
    with pytest.raises(DeviceLost):
        found.bind(a)
    found.back(a)
    assert found.bind(a).uuid == a


MEMINFO = (
    "MemTotal:       16000000 kB\nMemFree:  1 kB\nMemAvailable:    4000000 kB\nHugePages_Total:       0\n"
)


def machine(root: Path, **files: str) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_memory_of_a_machine_without_limits(tmp_path: Path) -> None:
    assert memory(machine(tmp_path)) == (16_000_000 * 1024, 12_000_000 * 1024)


V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"


def test_memory_of_a_container_is_its_limit(tmp_path: Path) -> None:
    files = {f"{V2}/memory.max": "1000000000\n", f"{V2}/memory.current": "700000000\n"}
    files[f"{V2}/memory.stat"] = "anon 100\nfile 300000000\n"
    assert memory(machine(tmp_path / "2", **files)) == (1_000_000_000, 400_000_000), "page cache is free"
    old = {f"{V1}/memory.limit_in_bytes": "1000000000", f"{V1}/memory.usage_in_bytes": "700000000"}
    old[f"{V1}/memory.stat"] = "total_cache 300000000\n"
    assert memory(machine(tmp_path / "1", **old)) == (1_000_000_000, 400_000_000)


@pytest.mark.parametrize("limit", ["max", "9223372036854771712"])
def test_a_limit_that_is_none_is_none(tmp_path: Path, limit: str) -> None:
    files = {f"{V2}/memory.max": limit, f"{V2}/memory.current": "7", f"{V2}/memory.stat": "file 1\n"}
    assert memory(machine(tmp_path, **files))[0] == 16_000_000 * 1024


def test_a_container_has_no_more_than_its_machine_has_left(tmp_path: Path) -> None:
    files = {f"{V2}/memory.max": "8000000000", f"{V2}/memory.current": "0", f"{V2}/memory.stat": "file 0\n"}
    total, used = memory(machine(tmp_path, **files))
    assert total - used == 4_000_000 * 1024


def test_the_cpu_is_one_device_that_hides_the_gpus() -> None:
    [device] = HostDevices().list()
    assert (device.uuid, device.index) == ("cpu", 0)
    assert HostDevices().bind("cpu").environment["CUDA_VISIBLE_DEVICES"] == ""


def test_weir_device_list_shows_what_can_be_bound_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "NvmlDevices", lambda **_: NvmlDevices(RecordedNvml(h200(1, busy=40), cut(3))))
    shown = CliRunner().invoke(cli.app, ["list"])
    assert shown.exit_code == 0
    assert [line.split()[1] for line in shown.stdout.splitlines()[1:]] == [h200(1).uuid, "MIG-3-a", "MIG-3-b"]
    body = json.loads(CliRunner().invoke(cli.app, ["list", "--json"]).stdout)
    assert (body["schema_version"], body["kind"], len(body["devices"])) == (1, "nvml", 2)
    assert body["devices"][0]["load"] == 0.4
    assert [part["name"] for part in body["devices"][1]["slices"]] == ["3g.71gb", "1g.18gb"]
    assert json.loads(CliRunner().invoke(cli.app, ["list", "--cpu", "--json"]).stdout)["kind"] == "host"
