"""Fake devices that a user asks for: the same each time, marked as fake, with the CPU behind them."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from regions.cli.errors import UsageError
from services.devices import cli, here


def test_pretended_devices_are_the_same_each_time_and_run_on_the_cpu() -> None:
    found, binding = here.at_start("", gpu=False, fake="fake:7:3")
    again, second = here.at_start("GPU-fake-0007-2", gpu=False, fake="fake:7:3")
    assert (found.kind, found.list()) == ("fake", again.list())
    assert len(found.list()) == 3
    assert second.uuid == "GPU-fake-0007-2"
    roomy = max(found.list(), key=lambda d: d.memory_free)
    assert (binding.uuid, binding.torch) == (roomy.uuid, "cpu")
    assert binding.environment == {"CUDA_VISIBLE_DEVICES": ""}


def test_a_list_of_pretended_devices_says_so() -> None:
    done = CliRunner().invoke(cli.app, ["list", "--devices", "fake:7:3"])
    assert done.exit_code == 0
    assert done.stdout.count("Fake GPU") == 3
    assert "These devices are fake" in done.output
    told = json.loads(CliRunner().invoke(cli.app, ["list", "--devices", "fake:7:3", "--json"]).stdout)
    assert (told["kind"], len(told["devices"])) == ("fake", 3)
    with pytest.raises(UsageError, match="--cpu"):
        CliRunner().invoke(cli.app, ["list", "--devices", "fake:7", "--cpu"], catch_exceptions=False)
