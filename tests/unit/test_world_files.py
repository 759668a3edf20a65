"""Files, locks, ports, certificates and marks of a local world."""

from __future__ import annotations

import datetime as dt
import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from mesh.world import certs, create, files, lock, patience, ports, strays
from mesh.world.addresses import Listener
from mesh.world.layout import MARKER, WorldLayout
from mesh.world.wish import Wish
from mesh.world.world import NoWorld, World
from regions.cli.errors import UsageError, WeirError

NOW = dt.datetime(2026, 11, 30, tzinfo=dt.UTC)
SUBNET = 119


def test_a_secret_is_never_readable_by_others(tmp_path: Path) -> None:
    files.write(tmp_path / "deep" / "secret", "x", mode=0o600)
    assert (tmp_path / "deep" / "secret").stat().st_mode & 0o777 == 0o600
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["secret"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "world.json"
    files.write(path, "old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(WeirError, match="no space left") as caught:
        files.write(path, "new")
    assert caught.value.way_out
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_said_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 10 * 2**20})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(WeirError, match="only 10 MB free"):
        files.check_space(tmp_path / "not" / "yet")


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(WeirError, match="a file stands where a folder must be"):
        files.private_folder(tmp_path / "x" / "y")


def test_a_link_is_no_private_folder(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(WeirError, match="is a link"):
        files.private_folder(tmp_path / "link")


HOLD = """
import sys
from pathlib import Path
from mesh.world import lock
with lock.held(Path(sys.argv[1])) as got:
    print(got, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", sys.executable, "-c", HOLD, str(tmp_path / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_lock_dies_with_its_holder(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    path = tmp_path / "lock"
    assert lock.holder(path) == holder.pid
    with lock.held(path) as got:
        assert not got
    holder.kill()
    holder.wait()
    assert lock.holder(path) is None
    with lock.held(path) as got:
        assert got
        assert path.read_text() == f"{os.getpid()}\n"


def test_nobody_holds_a_lock_that_never_was(tmp_path: Path) -> None:
    assert lock.holder(tmp_path / "none") is None


@pytest.fixture
def taken() -> Iterator[Listener]:
    listener = Listener(f"127.{SUBNET}.250.1", 8500, "Consul HTTP")
    with socket.create_server((listener.host, listener.port)):
        yield listener


def test_a_taken_port_names_its_holder(taken: Listener) -> None:
    with pytest.raises(ports.PortTaken) as caught:
        ports.refuse_taken([taken], SUBNET)
    said = str(caught.value)
    assert f"127.{SUBNET}.250.1:8500" in said
    assert f"process {os.getpid()}" in said
    assert "--subnet" in said


def test_a_listener_on_all_addresses_counts(taken: Listener) -> None:
    with socket.create_server(("0.0.0.0", 0)) as wide:
        assert not ports.free(Listener(taken.host, wide.getsockname()[1], "x"))


def test_a_claimed_number_is_passed_over() -> None:
    with ports.chosen(None, 1, 1, http=False) as first, ports.chosen(None, 1, 1, http=False) as second:
        assert first != second
        with pytest.raises(ports.PortTaken, match="taking it"), ports.chosen(first, 1, 1, http=False):
            pass


def test_self_made_certificate() -> None:
    bundle = certs.self_made(["127.20.1.3"], NOW)
    ca = x509.load_pem_x509_certificate(bundle.ca_pem.encode())
    leaf = x509.load_pem_x509_certificate(bundle.chain_pem.encode())
    leaf.verify_directly_issued_by(ca)
    assert isinstance(ca.public_key(), ec.EllipticCurvePublicKey)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "localhost" in names.get_values_for_type(x509.DNSName)
    assert bundle.key_pem not in repr(bundle)
    assert certs.usable(bundle, ["127.20.1.3"], NOW)
    assert not certs.usable(bundle, ["127.20.2.3"], NOW)
    assert not certs.usable(bundle, ["127.20.1.3"], NOW + certs.LEAF_LIFE - dt.timedelta(days=1))


def test_a_key_that_is_not_the_certificates(tmp_path: Path) -> None:
    one, two = certs.self_made([], NOW), certs.self_made([], NOW)
    (tmp_path / "c.pem").write_text(one.chain_pem)
    (tmp_path / "k.pem").write_text(two.key_pem)
    with pytest.raises(UsageError, match="isn't the key"):
        certs.given(tmp_path / "c.pem", tmp_path / "k.pem")
    (tmp_path / "k.pem").write_text(one.key_pem)
    assert certs.given(tmp_path / "c.pem", tmp_path / "k.pem").key_pem == one.key_pem
    with pytest.raises(UsageError, match="PEM"):
        certs.given(tmp_path / "none.pem", tmp_path / "k.pem")


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sockets' folder of the world under test; the real choice would stand in /tmp and outlive the test."""
    folder = tmp_path / "run"
    monkeypatch.setattr(create, "runtime_folder", lambda *_: folder)
    return folder


def test_a_world_is_made_and_found_again(tmp_path: Path, runtime: Path) -> None:
    folder = tmp_path / ".weir"
    wish = Wish(subnet=SUBNET, acl=True)
    with create.settled(folder, wish, None) as world:
        assert world.spec.number == SUBNET
    again = World.load(folder)
    assert again.spec == world.spec
    assert again.running == ()
    assert again.token == world.secrets.roles["operator"]
    for private in ("secrets.json", "tls/key.pem", "tls/ingress-sds.json", "tokens/operator"):
        assert (folder / private).stat().st_mode & 0o077 == 0
    with create.settled(folder, Wish(), None) as kept:
        assert kept.secrets == world.secrets
        assert certs.load(kept.layout) == certs.load(world.layout)


@pytest.mark.parametrize(
    "broken", ["", "{", "{}", '{"schema_version": 1, "runtime": "/x", "spec": {}}', "[]"]
)
def test_what_a_crash_left_is_replaced(tmp_path: Path, runtime: Path, broken: str) -> None:
    folder = tmp_path / ".weir"
    (folder / "regions" / "cn-north-1").mkdir(parents=True)
    (folder / "regions" / ".region.json.ab.part").write_text("{")
    (folder / "notes.txt").write_text("mine")
    (folder / "world.json").write_text(broken)
    with pytest.raises(NoWorld):
        World.load(folder)
    with create.settled(folder, Wish(subnet=SUBNET), None) as world:
        assert World.load(folder).spec == world.spec
    assert not list(folder.rglob("*.part"))
    assert (folder / "notes.txt").read_text() == "mine"


def test_purge_leaves_strangers_alone(tmp_path: Path) -> None:
    folder = tmp_path / ".weir"
    layout = WorldLayout(folder, tmp_path)
    files.write(layout.description, "{}")
    files.write(layout.region("r").facts, "{}")
    files.write(folder / "reports" / "drill.html", "evidence")
    create.forget(folder)
    assert [str(p.relative_to(folder)) for p in folder.rglob("*.*")] == ["reports/drill.html"]


def _sleeps(process: subprocess.Popen[bytes]) -> bool:
    it = psutil.Process(process.pid)
    return it.cmdline()[:1] == ["sleep"] and MARKER in it.environ()


def test_only_marked_processes_are_strays(tmp_path: Path) -> None:
    marked = {MARKER: str(tmp_path), "WEIR_REGION": "r", "WEIR_PROCESS": "consul"}
    half = {MARKER: str(tmp_path)}
    started = [
        subprocess.Popen(["setpriv", "--pdeathsig", "KILL", "sleep", "60"], env={**os.environ, **env})
        for env in (marked, half)
    ]
    try:
        # While a process becomes another program (setpriv: sleep), the kernel tells an empty environment.
        assert patience.until(lambda: all(map(_sleeps, started)), 60.0)
        assert [s.pid for s in strays.find(tmp_path)] == [started[0].pid]
        assert strays.find(tmp_path, "another") == ()
        strays.end(strays.find(tmp_path))
        assert not psutil.pid_exists(started[0].pid)
        assert started[1].poll() is None
    finally:
        for process in started:
            process.kill()
            process.wait()
