"""mesh.apt and mesh.tools_fetch with stand-ins for apt-get and dpkg-deb: what is asked, left and said.

Law: no network. The stand-ins are small shell scripts on a PATH of their own; that the real apt does
what they stand for is proved by `make setup` itself, without which no test runs.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from mesh import apt, tools, tools_fetch
from mesh.apt import machine_source, os_suite
from mesh.tools import BUNDLES, tree
from regions.cli.errors import WeirError

LISTING = (
    "http://other.test/\\tnodistro\\tmain\\t/none:1\\n"
    "http://mirror.test/debian/\\t{suite}\\tmain\\t{entry}:1\\n"
    "http://mirror.test/debian-security/\\t{suite}-security\\tmain\\t{entry}:2\\n"
)
APT = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$*" in
  *indextargets*) printf '{listing}'; exit 0;;
  *update*) {update} exit 0;;
  *download*) for last in "$@"; do :; done; touch "$last.deb"; exit 0;;
esac
"""
DPKG = """#!/bin/sh
# -x DEB FOLDER
mkdir -p "$3/usr/bin" "$3/usr/share/doc/consul"
printf '#!/bin/sh\\n{program}\\n' > "$3/usr/bin/consul"
chmod +x "$3/usr/bin/consul"
"""


class Machine:
    """A machine with an apt of ours. `env` is what the code under test is given."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.calls, self.cache = folder / "bin", folder / "calls", folder / "cache" / "weir"
        self.entry = folder / "debian.sources"
        self.bin.mkdir()
        self.env = {
            "PATH": f"{self.bin}{os.pathsep}/usr/bin{os.pathsep}/bin",
            "CALLS": str(self.calls),
            "XDG_CACHE_HOME": str(folder / "cache"),
        }
        self.apt()
        self.dpkg()

    def script(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)

    def apt(self, update: str = "", listing: str | None = None) -> None:
        rows = (
            LISTING.format(suite=os_suite() or "bookworm", entry=self.entry) if listing is None else listing
        )
        self.script("apt-get", APT.format(listing=rows, update=update))

    def dpkg(self, program: str = "echo Consul v1.8.7") -> None:
        self.script("dpkg-deb", DPKG.format(program=program))

    def said(self) -> str:
        return self.calls.read_text() if self.calls.exists() else ""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(tools, "EXTRA_PATH", ())
    return Machine(tmp_path)


def fetch_consul(machine: Machine) -> list[str]:
    said: list[str] = []
    tools_fetch.fetch([BUNDLES["consul"]], machine.env, said.append)
    return said


def left_over(machine: Machine) -> list[str]:
    return sorted(p.name for p in machine.cache.iterdir() if p.name != "setup.lock")


def test_a_tree_appears_whole_without_documentation_and_nothing_else_is_left(machine: Machine) -> None:
    said = fetch_consul(machine)
    place = tree("consul", machine.env)
    assert (place / "usr/bin/consul").is_file()
    assert not (place / "usr/share/doc").exists()
    assert left_over(machine) == ["trees"]
    assert "Consul v1.8.7" in said[-1]
    assert "bullseye from http://mirror.test/debian/" in said[0]


def test_what_is_there_is_not_fetched_again(machine: Machine) -> None:
    fetch_consul(machine)
    before = machine.said()
    assert fetch_consul(machine) == []
    assert machine.said() == before
    assert tools_fetch.missing(["consul"], machine.env) == []


def test_missing_names_each_bundle_once(machine: Machine) -> None:
    wanted = tools_fetch.missing(["prometheus", "promtool", "terraform", "consul"], machine.env)
    assert [b.name for b in wanted] == ["prometheus", "consul"]


def test_only_private_state_of_apt_is_touched(machine: Machine) -> None:
    fetch_consul(machine)
    updating = [line for line in machine.said().splitlines() if line.endswith((" update", " consul"))]
    assert len(updating) == 2
    for line in updating:
        for option in ("Dir::State=", "Dir::Cache=", "Dir::Etc::SourceList=", "Dir::Etc::SourceParts="):
            assert f"{option}{machine.cache}/scratch-" in line
        assert "allow-unauthenticated" not in line.lower()


def test_the_mirror_is_that_of_the_machines_own_suite(machine: Machine) -> None:
    ring = machine.entry.parent / "ring.gpg"
    ring.touch()
    machine.entry.write_text(f"Types: deb\nSigned-By: {ring}\n")
    source = machine_source(machine.env)
    assert source.uri == "http://mirror.test/debian/"
    assert source.own_suite == os_suite()
    assert source.keyrings[0] == ring
    assert f"signed-by={ring}" in source.line("bullseye")
    assert source.line("bullseye").endswith(" http://mirror.test/debian/ bullseye main\n")


def test_the_key_ring_of_a_one_line_source_is_found_too(machine: Machine) -> None:
    ring = machine.entry.parent / "ring.gpg"
    ring.touch()
    machine.entry.write_text(f"deb [arch=amd64 signed-by={ring}] http://mirror.test/debian/ x main\n")
    assert machine_source(machine.env).keyrings[0] == ring


def test_the_mirror_can_be_set_by_hand(machine: Machine) -> None:
    machine.apt(listing="")
    source = machine_source(machine.env | {"WEIR_DEBIAN_MIRROR": "http://own.test/debian"})
    assert source.uri == "http://own.test/debian"
    with pytest.raises(WeirError, match="WEIR_DEBIAN_MIRROR"):
        machine_source(machine.env)


def test_no_apt_is_said_plainly(machine: Machine) -> None:
    with pytest.raises(WeirError, match="apt-get is not there") as caught:
        fetch_consul_without_apt(machine)
    assert "PATH" in caught.value.way_out


def fetch_consul_without_apt(machine: Machine) -> None:
    tools_fetch.fetch([BUNDLES["consul"]], machine.env | {"PATH": "/nowhere"}, lambda line: None)


@pytest.mark.parametrize(
    ("output", "why", "way_out"),
    [
        (
            "E: Failed to fetch x Error writing to file - write (28: No space left on device)",
            "disk is full",
            "free",
        ),
        ("Err:1 x InRelease Could not connect to 127.0.0.1:9", "can't be reached", "network"),
        ("E: Failed to fetch x Temporary failure resolving y", "can't be reached", "network"),
        ("E: The repository x is not signed. NO_PUBKEY 1234", "signature", "debian-archive-keyring"),
        ("E: something new", "something new", "PATH"),
    ],
)
def test_a_failing_apt_is_explained_and_leaves_nothing(
    machine: Machine, output: str, why: str, way_out: str
) -> None:
    machine.apt(update=f"echo '{output}' >&2; exit 100;")
    with pytest.raises(WeirError) as caught:
        fetch_consul(machine)
    assert "bullseye" in caught.value.what
    assert why in caught.value.why
    assert way_out in caught.value.way_out
    assert left_over(machine) == []


def test_a_program_that_does_not_run_here_is_not_kept(machine: Machine) -> None:
    machine.dpkg(program="exit 127")
    with pytest.raises(WeirError, match="doesn't run here") as caught:
        fetch_consul(machine)
    assert "WEIR_CONSUL" in caught.value.way_out
    assert left_over(machine) == []


def test_the_rest_of_a_killed_set_up_is_cleared(machine: Machine) -> None:
    (machine.cache / "scratch-old").mkdir(parents=True)
    fetch_consul(machine)
    assert left_over(machine) == ["trees"]


def test_a_cache_that_cannot_be_written_names_the_variable(machine: Machine) -> None:
    machine.env["XDG_CACHE_HOME"] = str(machine.calls / "below-a-file")
    machine.calls.touch()
    with pytest.raises(WeirError, match="can't be written") as caught:
        fetch_consul(machine)
    assert "XDG_CACHE_HOME" in caught.value.way_out


def test_a_full_disk_of_ours_is_told_apart(tmp_path: Path) -> None:
    error = tools_fetch._explain(OSError(28, "No space left on device", "x"), tmp_path)
    assert error.why == "the disk is full"


def test_two_set_ups_at_once_fetch_once(machine: Machine) -> None:
    # The first one is held inside `apt-get update` until the second has said that it waits.
    gate = machine.cache.parent / "gate"
    machine.apt(update=f"while [ ! -e '{gate}' ]; do sleep 0.02; done;")
    waiting, errors = threading.Event(), []

    def say(line: str) -> None:
        if "waiting" in line:
            waiting.set()

    def one() -> None:
        try:
            tools_fetch.fetch([BUNDLES["consul"]], machine.env, say)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    met = waiting.wait(60)
    gate.touch()
    for thread in threads:
        thread.join(60)
    assert met, "the second set-up did not wait for the first"
    assert errors == []
    assert machine.said().count(" update") == 1


def test_the_suite_is_read_from_os_release(tmp_path: Path) -> None:
    release = tmp_path / "os-release"
    release.write_text('NAME="Debian"\nVERSION_CODENAME=trixie\n')
    assert os_suite(release) == "trixie"
    release.write_text("NAME=other\n")
    assert os_suite(release) == ""
    assert os_suite(tmp_path / "none") == ""


def test_a_step_that_never_ends_is_given_up(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apt, "STEP_TIMEOUT_S", 0.2)
    machine.apt(update="exec sleep 30;")
    with pytest.raises(WeirError, match="gave no end"):
        fetch_consul(machine)
    assert left_over(machine) == []
