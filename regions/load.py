"""regions/*.yaml → RegionSet.

Law: reads files, decides nothing about traffic. One file is one region; a new region is a new file, no code.
The file's model lives here and nowhere else: past this door there are only frozen `regions.model` values.
All files are read before anything is said, so that one run shows every mistake.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from regions.model import Cloud, Gateways, Region, RegionSet, RegionSetError
from regions.yamlfile import DataFileError, Marked, Problem, StrictModel, data_files, read_marked, shown

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]{2,45}\]")
_PORT = re.compile(r"[1-9][0-9]{0,4}")


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError("must be 1 to 63 lower-case letters, digits and '-' (it also names the datacenter)")
    return text


def _host_port(text: str) -> str:
    host, _, port = text.rpartition(":")
    known = _HOST.fullmatch(host) and _PORT.fullmatch(port) and int(port) < 65536
    if text and not known:
        raise ValueError("must be host:port with a port from 1 to 65535, or empty when it isn't known yet")
    return text


Name = Annotated[str, AfterValidator(_name), Field(json_schema_extra={"pattern": f"^{_NAME.pattern}$"})]
HostPort = Annotated[str, AfterValidator(_host_port)]
Zone = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]


class GatewaysFile(StrictModel):
    """Public addresses, host:port. Empty means: not known before the region is applied."""

    ingress: HostPort = Field(default="", description="of the ingress gateway")
    mesh: HostPort = Field(default="", description="of the mesh gateway")


class RegionFile(StrictModel):
    """One region of the mesh. The file is named <name>.yaml; weir and Terraform (yamldecode) read it."""

    name: Name = Field(description="equals the file name; also the name of the region's Consul datacenter")
    cloud: Literal["aws", "azure", "local"] = Field(description="local: loopback addresses on this machine")
    zones: list[Zone] = Field(min_length=1, description="availability zones, no name twice")
    failover: list[Name] = Field(description="regions that take over, first choice first")
    weight: float = Field(ge=0, le=1e6, description="share of the traffic relative to the other regions")
    gateways: GatewaysFile = Field(default_factory=GatewaysFile)
    primary: bool = Field(default=False, description="true in exactly one region: the primary datacenter")
    network: str = Field(
        default="",
        max_length=63,
        description="regions of one non-empty network reach each other without mesh gateways",
    )

    def row(self) -> Region:
        return Region(
            name=self.name,
            cloud=Cloud(self.cloud),
            zones=tuple(self.zones),
            failover=tuple(self.failover),
            weight=float(self.weight),
            gateways=Gateways(self.gateways.ingress, self.gateways.mesh),
            primary=self.primary,
            network=self.network,
        )


def default_dir() -> Path:
    """`./regions` when it has region files, else the folder that ships with weir."""
    here = Path("regions")
    return here if any(here.glob("*.yaml")) else Path(__file__).parent


def json_schema() -> dict[str, Any]:
    """JSON Schema of one region file (editors complete and check with it). `load_regions` checks more."""
    schema = RegionFile.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "weir region"}


def load_regions(folder: Path) -> RegionSet:
    """All regions of a folder. Raises DataFileError naming file, line and field of everything wrong."""
    files, odd = data_files(folder)
    problems = list(odd)
    rows: list[Marked[RegionFile]] = []
    for path in files:
        try:
            rows.append(read_marked(path, RegionFile))
        except DataFileError as error:
            problems += error.problems
    known = {path.stem for path in files}
    for path, row in ((Path(row.file), row) for row in rows):
        problems += _check_row(row, path.stem, known)
    if not files:
        problems.append(Problem(shown(folder), 0, "", "no region: the folder has no *.yaml file"))
    elif not problems:
        problems += _check_all(rows)
    if problems:
        raise DataFileError(problems)
    try:
        return RegionSet(tuple(row.value.row() for row in rows))
    except RegionSetError as error:  # a rule that the checks above don't know yet: still no traceback
        raise DataFileError([Problem(shown(folder), 0, "", str(error))]) from error


def _check_row(row: Marked[RegionFile], stem: str, known: set[str]) -> Iterator[Problem]:
    region = row.value
    if region.name != stem:
        yield row.problem(("name",), f"must equal the file name: {stem!r}")
    for number, other in enumerate(region.failover):
        if other == region.name:
            yield row.problem(("failover", number), "names the region itself")
        elif other not in known:
            names = ", ".join(sorted(known))
            yield row.problem(("failover", number), f"unknown region {other!r}; known: {names}")
    yield from _twice(row, "failover", region.failover)
    yield from _twice(row, "zones", region.zones)


def _twice(row: Marked[RegionFile], field: str, values: Sequence[str]) -> Iterator[Problem]:
    for number, value in enumerate(values):
        if value in values[:number]:
            yield row.problem((field, number), f"{value!r} is named twice")


def _check_all(rows: Sequence[Marked[RegionFile]]) -> Iterator[Problem]:
    primaries = [row for row in rows if row.value.primary]
    if not primaries:
        folder = str(Path(rows[0].file).parent)
        yield Problem(folder, 0, "primary", "no region has primary: true; exactly one must")
    for row in primaries[1:]:
        yield row.problem(("primary",), f"a second primary region; {primaries[0].value.name} is one already")
    if all(row.value.weight == 0 for row in rows):
        yield rows[0].problem(("weight",), "the weights of all regions are zero")
