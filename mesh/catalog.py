"""services/catalog/*.yaml → ServiceSpec.

Law: reads files, strict; past this door there are only frozen `mesh.model` values. What a file leaves out has
the default of `mesh.model.ServiceSpec`, so that there is one place for defaults.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from intentions.load import is_service_name
from mesh.model import CircuitSpec, RateLimitSpec, RetrySpec, ServiceSpec
from regions.yamlfile import DataFileError, Marked, Problem, StrictModel, data_files, read_marked, shown

_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+")
_DEFAULT = ServiceSpec(name="", prefix="")
MAX_COUNT = 1_000_000


def _service(text: str) -> str:
    if not is_service_name(text):
        raise ValueError("must be a service name: lower-case letters, digits and '-', at most 63")
    return text


def _path(text: str) -> str:
    if not _PATH.fullmatch(text) or {".", ".."} & set(text.split("/")):
        raise ValueError(
            "must be a path such as /chat: it starts with '/', doesn't end with one, plain characters"
        )
    return text


Service = Annotated[str, AfterValidator(_service)]
UrlPath = Annotated[str, AfterValidator(_path)]
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]


class RetryFile(StrictModel):
    attempts: int = Field(default=_DEFAULT.retry.attempts, ge=1, le=10, description="tries in all")
    budget_percent: float = Field(default=_DEFAULT.retry.budget_percent, ge=0, le=100)
    min_concurrency: int = Field(default=_DEFAULT.retry.min_concurrency, ge=0, le=MAX_COUNT)
    base_interval_ms: int = Field(default=_DEFAULT.retry.base_interval_ms, ge=1, le=60_000)


class RateLimitFile(StrictModel):
    requests_per_second: Count = _DEFAULT.rate_limit.requests_per_second
    burst: Count = _DEFAULT.rate_limit.burst
    retry_after_s: int = Field(default=_DEFAULT.rate_limit.retry_after_s, ge=0, le=3_600)


class CircuitFile(StrictModel):
    max_connections: Count = _DEFAULT.circuit.max_connections
    max_pending: Count = _DEFAULT.circuit.max_pending
    max_requests: Count = _DEFAULT.circuit.max_requests


class ServiceFile(StrictModel):
    """A service as its owner describes it. The file is named <name>.yaml."""

    name: Service
    prefix: UrlPath
    health_path: UrlPath = _DEFAULT.health_path
    idle_timeout_s: Seconds = _DEFAULT.idle_timeout_s
    first_byte_timeout_s: Seconds = _DEFAULT.first_byte_timeout_s
    capacity_rps: float = Field(default=_DEFAULT.capacity_rps, gt=0, le=MAX_COUNT)
    dye_header: bool = _DEFAULT.dye_header
    retry: RetryFile = Field(default_factory=RetryFile)
    rate_limit: RateLimitFile = Field(default_factory=RateLimitFile)
    circuit: CircuitFile = Field(default_factory=CircuitFile)

    def spec(self) -> ServiceSpec:
        plain = self.model_dump(exclude={"retry", "rate_limit", "circuit"})
        return ServiceSpec(
            **plain,
            retry=RetrySpec(**self.retry.model_dump()),
            rate_limit=RateLimitSpec(**self.rate_limit.model_dump()),
            circuit=CircuitSpec(**self.circuit.model_dump()),
        )


def default_dir() -> Path:
    """`./services/catalog` when it has files, else the folder that ships with weir.

    By path, not by import: the services room stands above this one.
    """
    here = Path("services/catalog")
    return here if any(here.glob("*.yaml")) else Path(__file__).parent.parent / "services" / "catalog"


def load_services(folder: Path) -> tuple[ServiceSpec, ...]:
    """All services of a folder, sorted by name. Raises DataFileError naming file, line and field."""
    files, odd = data_files(folder)
    problems = list(odd)
    rows: list[Marked[ServiceFile]] = []
    for path in files:
        try:
            rows.append(read_marked(path, ServiceFile))
        except DataFileError as error:
            problems += error.problems
    problems += _check(rows)
    if not files:
        problems.append(Problem(shown(folder), 0, "", "no service: the folder has no *.yaml file"))
    if problems:
        raise DataFileError(problems)
    return tuple(sorted((row.value.spec() for row in rows), key=lambda s: s.name))


def _check(rows: Sequence[Marked[ServiceFile]]) -> Iterator[Problem]:
    prefixes: dict[str, str] = {}
    for row in rows:
        spec, stem = row.value, Path(row.file).stem
        if spec.name != stem:
            yield row.problem(("name",), f"must equal the file name: {stem!r}")
        if spec.first_byte_timeout_s > spec.idle_timeout_s:
            # Envoy would cut the stream as idle before the try could fail over.
            yield row.problem(
                ("first_byte_timeout_s",), f"must not be over idle_timeout_s ({spec.idle_timeout_s:g})"
            )
        if spec.rate_limit.burst < spec.rate_limit.requests_per_second:
            yield row.problem(("rate_limit", "burst"), "must not be under requests_per_second")
        if spec.prefix in prefixes:
            yield row.problem(
                ("prefix",), f"{spec.prefix} belongs to service {prefixes[spec.prefix]} already"
            )
        prefixes.setdefault(spec.prefix, spec.name)
