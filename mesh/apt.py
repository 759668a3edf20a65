"""Debian packages without root: a private apt that reads a suite, downloads, and unpacks into a folder.

Law: changes nothing of the machine's own apt. State, cache and source list are private and thrown
away; only the mirror's address, the key ring and the proxy settings come from the machine's
configuration. Signatures are checked as always.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from regions.cli.errors import WeirError

ARCHIVE_KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
# One step of apt; the package list of a suite is some 9 MB.
STEP_TIMEOUT_S = 600.0

_NO_SPACE = re.compile(r"No space left on device|not enough free space|Disk quota exceeded", re.I)
_NO_MIRROR = re.compile(
    r"Could not resolve|Could not connect|Unable to connect|Connection (failed|refused|timed out)"
    r"|Temporary failure|Failed to fetch|Some index files failed",
    re.I,
)
_NO_KEY = re.compile(
    r"NO_PUBKEY|EXPKEYSIG|is not signed|signatures? (couldn't be|were) (verified|invalid)", re.I
)


@dataclass(frozen=True, slots=True)
class Source:
    """Where packages come from: the mirror's base address, the machine's own suite, the key rings."""

    uri: str
    own_suite: str
    keyrings: tuple[Path, ...]

    def line(self, suite: str) -> str:
        """The line of a sources.list for one suite, package lists only (no translations, no icons)."""
        options = "target=Packages"
        if self.keyrings:
            options += " signed-by=" + ",".join(map(str, self.keyrings))
        return f"deb [{options}] {self.uri} {suite} main\n"


def machine_source(environ: Mapping[str, str]) -> Source:
    """What apt itself is set up with. `WEIR_DEBIAN_MIRROR` replaces the mirror's address.

    Raises WeirError when this is no machine with apt, or apt has no source to start from.
    """
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program, path=environ.get("PATH")) is None:
            raise WeirError(
                "set-up",
                f"{program} is not there, so packages can't be fetched on this machine",
                "install the tools by hand and put them on PATH (`weir doctor` lists them)",
            )
    form = "$(REPO_URI)\t$(RELEASE)\t$(COMPONENT)\t$(SOURCESENTRY)"
    command = ["apt-get", "indextargets", "--no-release-info", "--format", form, "Created-By: Packages"]
    listing = _run(command, environ).stdout
    rows = [tuple(line.split("\t")) for line in listing.splitlines() if line.count("\t") == 3]
    rows = [row for row in rows if row[2] == "main"]
    suite = os_suite()
    row = next((r for r in rows if r[1] == suite), None) or next(iter(rows), None)
    mirror = environ.get("WEIR_DEBIAN_MIRROR", "")
    if row is None and not mirror:
        raise WeirError(
            "set-up",
            "apt knows no package source on this machine",
            "set WEIR_DEBIAN_MIRROR to the address of a Debian mirror, or put the tools on PATH",
        )
    entry = Path(row[3].rsplit(":", 1)[0]) if row else Path()
    return Source(mirror or (row[0] if row else ""), suite or (row[1] if row else ""), _keyrings(entry))


def os_suite(release_file: Path = Path("/etc/os-release")) -> str:
    """The code name of the machine's own release, or empty when it has none."""
    if not release_file.is_file():
        return ""
    match = re.search(r"^VERSION_CODENAME=\"?([\w-]+)", release_file.read_text(encoding="utf-8"), re.M)
    return match.group(1) if match else ""


def _keyrings(entry: Path) -> tuple[Path, ...]:
    """The ring apt's own entry names and Debian's archive ring: an older suite has other keys."""
    rings = [ARCHIVE_KEYS] if ARCHIVE_KEYS.is_file() else []
    if entry.is_file():
        text = entry.read_text(encoding="utf-8", errors="replace")
        for named in re.findall(r"signed-by\s*[:=]\s*(/[^\s\],]+)", text, re.I):
            ring = Path(named)
            if ring.is_file() and ring not in rings:
                rings.insert(0, ring)
    return tuple(rings)


class PrivateApt:
    """An apt of our own in `folder`, for one suite. The folder is the caller's to throw away."""

    def __init__(self, folder: Path, source: Source, suite: str, environ: Mapping[str, str]) -> None:
        self._folder, self._source, self._suite = folder, source, suite
        self._env = {**environ, "LC_ALL": "C"}

    def update(self) -> None:
        """Fetch the suite's package list."""
        for sub in ("state/lists/partial", "cache/archives/partial", "etc/parts"):
            (self._folder / sub).mkdir(parents=True, exist_ok=True)
        (self._folder / "state/status").touch()
        (self._folder / "etc/sources.list").write_text(self._source.line(self._suite), encoding="utf-8")
        self._apt(["update"])

    def unpack(self, packages: Sequence[str], into: Path) -> None:
        """Download `packages` (and nothing they depend on) and unpack them over one another."""
        downloads = self._folder / "debs"
        downloads.mkdir(exist_ok=True)
        self._apt(["download", *packages], cwd=downloads)
        for deb in sorted(downloads.glob("*.deb")):
            self._checked(["dpkg-deb", "-x", str(deb), str(into)])
            deb.unlink()

    def _apt(self, arguments: Sequence[str], cwd: Path | None = None) -> None:
        root = self._folder
        options = [
            f"Dir::State={root}/state",
            f"Dir::State::status={root}/state/status",
            f"Dir::Cache={root}/cache",
            f"Dir::Etc::SourceList={root}/etc/sources.list",
            f"Dir::Etc::SourceParts={root}/etc/parts",
            # A pin of the machine (say, "never bullseye") is about installing, which we don't do.
            f"Dir::Etc::Preferences={root}/etc/preferences",
            f"Dir::Etc::PreferencesParts={root}/etc/parts",
            "APT::Update::Error-Mode=any",
            "Acquire::http::Timeout=30",
            "Acquire::https::Timeout=30",
            "Acquire::Retries=2",
        ]
        if os.geteuid() == 0:
            # As root, apt would step down to a user who can't write into our folder.
            options.append("APT::Sandbox::User=root")
        flags = [part for option in options for part in ("-o", option)]
        self._checked(["apt-get", "-q", *flags, *arguments], cwd=cwd)

    def _checked(self, command: Sequence[str], cwd: Path | None = None) -> None:
        done = _run(command, self._env, cwd)
        if done.returncode:
            raise self._explain(command[0], done.stdout + done.stderr)

    def _explain(self, program: str, output: str) -> WeirError:
        last = [line for line in output.splitlines() if line.startswith(("E:", "W:", "Err:", "dpkg"))][-3:]
        said = "; ".join(last) or output.strip()[-300:] or "it said nothing"
        what = f"packages of Debian {self._suite} from {self._source.uri}"
        if _NO_SPACE.search(output):
            return WeirError(
                what,
                f"the disk is full ({said})",
                f"free some 600 MB on the disk of {self._folder.parent.parent} and run it again",
            )
        if _NO_KEY.search(output):
            return WeirError(
                what,
                f"the signature can't be checked ({said})",
                "install the package debian-archive-keyring, or put the tool on PATH yourself",
            )
        if _NO_MIRROR.search(output):
            return WeirError(
                what,
                f"the mirror can't be reached or has no such suite ({said})",
                "check the network and apt's proxy, set WEIR_DEBIAN_MIRROR, or put the tool on PATH yourself",
            )
        return WeirError(
            what, f"{program} failed: {said}", "put the tool on PATH yourself, or read the message"
        )


def _run(
    command: Sequence[str], environ: Mapping[str, str], cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            list(command),
            env=dict(environ),
            cwd=cwd,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=STEP_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        raise WeirError(
            command[0], f"gave no end within {STEP_TIMEOUT_S:.0f} s", "check the network and run it again"
        ) from late
