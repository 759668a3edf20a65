"""`weir executor` as a process: ready, drained by a signal, stopped at once, killed, refused."""

from __future__ import annotations

import http.client
import re
import signal
import socket
from pathlib import Path

import pytest

from services.devices.claims import RESERVE
from services.devices.host import memory
from tests.contract.executor_process import executor, until
from tests.sse import events

pytestmark = pytest.mark.real
SLOW = ("--token-cost-ms", "20")
LOST = (http.client.IncompleteRead, ConnectionError)


def test_ready_then_serving_then_drained_by_sigterm(tmp_path: Path) -> None:
    """A stream under way finishes whole; meanwhile /ready says no; then the process ends well."""
    with executor(tmp_path, "127.107.1.10", *SLOW, "--drain-deadline-s", "600", wait=False) as it:
        line = it.ready_line()
        assert (line["ready"], line["instance"]) == (True, "chat-stable-0")
        assert line["pid"] == it.process.pid
        assert (it.get("/health"), it.get("/ready")) == (200, 200)
        stream = it.stream(max_tokens=20)
        # The drain lasts until this client leaves, however late the other one is looked at.
        holds = it.stream(max_tokens=30_000)
        for one in (holds, stream):
            one.take(2)
        it.signal(signal.SIGTERM)
        until("not ready while draining", lambda: it.get("/ready") == 503)
        assert it.get("/health") == 200
        said = events(stream.rest())
        assert (len(said), said[-1]) == (21, "[DONE]")
        assert it.process.poll() is None, "one stream is still under way"
        holds.close()
        assert it.ended() == 0
        told = it.log.read_text()
        assert re.search("asked to stop: [12] in flight", told)
        assert "the engine starts: echo" in told


def test_a_second_sigterm_stops_at_once(tmp_path: Path) -> None:
    with executor(tmp_path, "127.107.1.11", "--option", "hang_after=3", "--drain-deadline-s", "600") as it:
        stream = it.stream()
        stream.take(3)
        it.signal(signal.SIGTERM)
        until("draining", lambda: it.get("/ready") == 503)
        assert it.process.poll() is None
        it.signal(signal.SIGTERM)
        assert it.ended() == 0
        with pytest.raises(LOST):
            stream.rest()


def test_a_drain_is_bounded_by_its_deadline(tmp_path: Path) -> None:
    with executor(tmp_path, "127.107.1.12", "--option", "hang_after=1", "--drain-deadline-s", "0.2") as it:
        stream = it.stream()
        stream.take(1)
        it.signal(signal.SIGTERM)
        assert it.ended() == 0
        with pytest.raises(LOST):
            stream.rest()
        assert "1 requests in flight" in it.log.read_text()


def test_killed_in_the_middle_of_a_stream_is_seen_as_cut(tmp_path: Path) -> None:
    with executor(tmp_path, "127.107.1.13", *SLOW) as it:
        stream = it.stream(max_tokens=3000)
        stream.take(3)
        it.signal(signal.SIGKILL)
        with pytest.raises(LOST):
            stream.rest()
        assert it.ended() == -signal.SIGKILL


def test_a_client_that_goes_away_leaves_nothing_running(tmp_path: Path) -> None:
    with executor(tmp_path, "127.107.1.14", *SLOW) as it:
        stream = it.stream(max_tokens=30_000)
        stream.take(2)
        assert it.running() == 1.0
        stream.close()
        until("the slot is free", lambda: it.running() == 0.0)


def test_the_admin_port_drains_sleeps_and_wakes(tmp_path: Path) -> None:
    ip = "127.107.1.15"
    with executor(tmp_path, ip, "--admin", f"{ip}:9001") as it:
        assert it.ask("POST", "/sleep", port=9001)[1]["asleep"] is True
        assert (it.get("/ready"), it.get("/health")) == (503, 200)
        assert it.ask("POST", "/wake", port=9001)[1]["asleep"] is False
        assert it.get("/ready") == 200
        assert it.ask("POST", "/drain")[0] == 404, "not on the port that the mesh reaches"
        assert it.ask("POST", "/drain", port=9001)[1]["draining"] is True
        assert it.ended() == 0


def test_a_port_already_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.107.1.16", 9000)), executor(tmp_path, "127.107.1.16", wait=False) as it:
        assert it.ended() == 1
        assert "127.107.1.16:9000" in it.log.read_text()
        assert "in use" in it.log.read_text()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--engine", "vllm9"), "vllm9"),
        (("--option", "prise=3"), "prise"),
        (("--token-cost-ms", "-4"), "token_cost_ms"),
        (("--admin", "10.1.2.3:9001"), "loopback"),
        (("--consul", "http://127.107.1.1:8500"), "--sidecar"),
    ],
)
def test_bad_flags_are_usage_errors(tmp_path: Path, options: tuple[str, ...], named: str) -> None:
    with executor(tmp_path, "127.107.1.17", *options, wait=False) as it:
        assert it.ended() == 2
        assert named in it.log.read_text()


def test_a_second_instance_that_can_not_fit_on_the_device_is_refused_by_name(tmp_path: Path) -> None:
    env = {"TMPDIR": str(tmp_path)}
    # A pretended device of 80 GiB: of the machine's own memory half may not be free, whoever uses it.
    half = ("--devices", "fake:7:1", "--device-memory", "40GiB")
    with executor(tmp_path, "127.107.1.18", *half, "--instance", "first", env=env) as one:
        with executor(tmp_path, "127.107.1.19", *half, env=env, wait=False) as two:
            assert two.ended() == 4
            said = two.log.read_text()
            assert "first (process" in said
            assert "--device-memory" in said
        assert one.get("/health") == 200
        one.signal(signal.SIGKILL)
        one.ended()
    with executor(tmp_path, "127.107.1.19", *half, env=env) as two:
        assert two.get("/ready") == 200, "a claim dies with its process, however it died"


def test_what_one_instance_claims_of_the_cpu_another_can_not_have(tmp_path: Path) -> None:
    env, cpu = {"TMPDIR": str(tmp_path)}, ("--device", "cpu", "--device-memory")
    # The first leaves less than all that may be claimed; how much is free just now doesn't matter.
    whole = str(int(memory()[0] * (1 - RESERVE)))
    with (
        executor(tmp_path, "127.107.1.20", *cpu, "1MiB", "--instance", "first", env=env),
        executor(tmp_path, "127.107.1.21", *cpu, whole, env=env, wait=False) as two,
    ):
        assert two.ended() == 4
        assert "first (process" in two.log.read_text()
