"""Shares of a device's memory: who is refused beside whom, and that a claim dies with its process."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regions.cli.errors import Refused, WeirError
from services.devices import claims
from services.devices.claims import Claim, claimed, why_not
from services.devices.door import Device
from tests.fakes.pynvml_recorded import GIB

CARD = Device(0, "GPU-0", "x", 100 * GIB, 10 * GIB, 0.0)


def claim(size: int, name: str = "chat-stable-0", pid: int = 4242) -> Claim:
    return Claim(pid, "boot:1", name, size)


def test_who_can_not_fit_beside_the_others_is_told_who_they_are() -> None:
    assert why_not(CARD, 40 * GIB, [claim(50 * GIB)]) == ""
    why = why_not(CARD, 60 * GIB, [claim(50 * GIB)])
    assert "60.00 GiB" in why
    assert "chat-stable-0 (process 4242) has 50.00 GiB" in why
    assert "only 90.00 GiB are free" in why_not(CARD, 95 * GIB, []), "used by somebody who claims nothing"


@given(st.lists(st.integers(0, 100 * GIB), max_size=6))
def test_claims_that_were_admitted_never_sum_to_more_than_the_device(sizes: list[int]) -> None:
    held: list[Claim] = []
    for size in sizes:
        if not why_not(CARD, size, held):
            held.append(claim(size))
    assert sum(c.size for c in held) <= 0.98 * CARD.memory_total


def test_the_second_instance_on_a_device_is_refused_and_may_come_when_the_first_has_gone(
    tmp_path: Path,
) -> None:
    with claimed(tmp_path / "d", CARD, 60 * GIB, "first"):
        with pytest.raises(Refused, match=r"first \(process"), claimed(tmp_path / "d", CARD, 60 * GIB, "b"):
            pass
        with claimed(tmp_path / "d", CARD, 30 * GIB, "small"):
            pass
    with claimed(tmp_path / "d", CARD, 60 * GIB, "second"):
        pass


def test_a_claim_dies_with_its_process(tmp_path: Path) -> None:
    with claimed(tmp_path / "d", CARD, 60 * GIB, "alive"):
        [book] = (tmp_path / "d").glob("*.json")
        rows = json.loads(book.read_text())
        rows[0]["born"] += "1"  # another process had this pid before
        book.write_text(json.dumps(rows))
        with claimed(tmp_path / "d", CARD, 60 * GIB, "next"):
            pass
    book.parent.mkdir(mode=0o700)  # it went with the last claim
    book.write_text("not ours")
    with claimed(tmp_path / "d", CARD, 60 * GIB, "next"):
        pass


def test_a_claim_outlives_a_clock_that_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel then tells another moment of its boot, and with it of the start of every process."""
    with claimed(tmp_path / "d", CARD, 60 * GIB, "first"):
        monkeypatch.setattr("psutil._pslinux.boot_time", lambda: 1e9)
        monkeypatch.setattr("time.time", lambda: 2e9)
        with pytest.raises(Refused, match="first"), claimed(tmp_path / "d", CARD, 60 * GIB, "second"):
            pass


def test_a_dead_process_that_nobody_has_reaped_claims_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert claims._born(child.pid) not in ("", claims._born(os.getpid()))
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert claims._born(child.pid) == ""


def test_the_folder_goes_with_the_last_claim_and_is_never_two(tmp_path: Path) -> None:
    """Whoever waits for a lock on a folder that its holder removes must not take it for a lock."""
    folder, inside, most = tmp_path / "d", list[str](), list[int]()

    def one(name: str) -> None:
        for _ in range(20):
            with contextlib.suppress(Refused), claimed(folder, CARD, 60 * GIB, name):
                inside.append(name)
                most.append(len(inside))
                inside.remove(name)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(one, "abcdef"))
    assert set(most) == {1}, "two had 60 of 98 GiB"
    assert not folder.exists()


def test_a_folder_that_another_one_made_anew_is_the_one_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, waited = tmp_path / "d", list[int]()

    def flock(handle: int, how: int) -> None:
        waited.append(handle)
        if len(waited) < 3:
            folder.rmdir()  # its holder was the last, while we waited
        if len(waited) == 1:
            folder.mkdir(mode=0o700)

    monkeypatch.setattr(claims.fcntl, "flock", flock)
    with claimed(folder, CARD, GIB, "late"):
        assert len(waited) == 3
        assert len(list(folder.iterdir())) == 1
    assert not folder.exists()


def test_a_folder_that_goes_while_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mkdir says that it is there, and it isn't any more when Python looks what it is."""
    folder, seen, real = tmp_path / "d", list[Path](), Path.is_dir

    def gone(path: Path) -> bool:
        if path == folder and not seen:
            seen.append(path)
            folder.rmdir()
        return real(path)

    folder.mkdir(mode=0o700)
    monkeypatch.setattr(Path, "is_dir", gone)
    with claimed(folder, CARD, GIB, "late"):
        assert seen == [folder]
    folder.write_text("no folder")
    with pytest.raises(WeirError, match="a file stands"), claimed(folder, CARD, GIB, "next"):
        pass
