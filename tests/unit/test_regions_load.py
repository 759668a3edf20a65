"""Region files: what is read, and that every mistake is told with file, line and field."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from regions.cli.errors import Exit
from regions.load import json_schema, load_regions
from regions.model import Cloud, Gateways
from regions.yamlfile import MAX_BYTES, DataFileError, StrictModel, read_strict

SHIPPED = Path(__file__).parents[2] / "regions"

EAST = """\
name: us-east-1
cloud: aws
zones: [us-east-1a]
weight: 1.5
failover:
  - cn-north-1
primary: false
gateways: {ingress: "10.0.0.1:443", mesh: "[::1]:8443"}
network: flat
"""
NORTH = """\
name: cn-north-1
cloud: aws
zones: [cn-north-1a]
failover: []
weight: 0
primary: true
"""


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name.replace('_', '-')}.yaml").write_text(text)
    return folder


def problems(folder: Path) -> list[tuple[str, int, str, str]]:
    with pytest.raises(DataFileError) as caught:
        load_regions(folder)
    assert caught.value.exit_code is Exit.USAGE
    return [(Path(p.file).name, p.line, p.field, p.reason) for p in caught.value.problems]


def test_the_shipped_regions_fit_together() -> None:
    rows = load_regions(SHIPPED)
    assert rows.names == ("cn-north-1", "us-east-1", "westeurope")
    assert rows.primary.name == "cn-north-1"
    assert [r.cloud for r in rows.regions] == [Cloud.AWS, Cloud.AWS, Cloud.AZURE]
    # Every region must be able to fail over to every other one.
    assert all({r.name, *r.failover} == set(rows.names) for r in rows.regions)


def test_every_field_arrives(tmp_path: Path) -> None:
    row = load_regions(write(tmp_path, us_east_1=EAST, cn_north_1=NORTH)).get("us-east-1")
    assert row is not None
    assert (row.cloud, row.zones, row.failover, row.weight) == (
        Cloud.AWS, ("us-east-1a",), ("cn-north-1",), 1.5,
    )  # fmt: skip
    assert (row.gateways, row.primary, row.network) == (
        Gateways("10.0.0.1:443", "[::1]:8443"), False, "flat",
    )  # fmt: skip


def test_an_unknown_failover_region_is_named_with_its_line(tmp_path: Path) -> None:
    text = EAST.replace("  - cn-north-1\n", "  - cn-north-1\n  - eu\n")
    folder = write(tmp_path, us_east_1=text, cn_north_1=NORTH)
    assert problems(folder) == [
        ("us-east-1.yaml", 7, "failover[1]", "unknown region 'eu'; known: cn-north-1, us-east-1")
    ]
    with pytest.raises(DataFileError, match=r"us-east-1\.yaml:7: failover\[1\]: unknown region 'eu'"):
        load_regions(folder)


def test_all_problems_of_all_files_are_told_at_once(tmp_path: Path) -> None:
    east = (
        EAST.replace("weight: 1.5", "weight: -1").replace("cloud: aws", "cloud: gcp").replace("a]", "a, 7]")
    )
    north = NORTH.replace("name: cn-north-1", "name: cn-north-2").replace("failover: []\n", "")
    found = problems(write(tmp_path, us_east_1=east, cn_north_1=north))
    assert [(f, line, field) for f, line, field, _ in found] == [
        ("cn-north-1.yaml", 1, "failover"),
        ("us-east-1.yaml", 2, "cloud"),
        ("us-east-1.yaml", 3, "zones[1]"),
        ("us-east-1.yaml", 4, "weight"),
    ]


@pytest.mark.parametrize(
    ("old", "new", "line", "field", "words"),
    [
        ("weight: 1.5", "weight: 1.5\nweight: 2", 5, "weight", "written twice, first on line 4"),
        ("weight: 1.5", 'weight: "1.5"', 4, "weight", "number"),
        ("weight: 1.5", "weight: .nan", 4, "weight", "readers disagree"),
        ("weight: 1.5", "weight: 1_000", 4, "weight", "readers disagree"),
        ("weight: 1.5", "weight: 1e3", 4, "weight", "readers disagree"),
        ("primary: false", "primary: no", 7, "primary", "readers disagree"),
        ("primary: false", "primary: 0", 7, "primary", "true or false"),
        ("primary: false", "primary: !!python/name:os.system x", 7, "primary", "YAML tag"),
        ("network: flat", "network: &a flat\nextra: *a", 10, "extra", "alias"),
        ("network: flat", "colour: red", 9, "colour", "unknown field"),
        ("network: flat", "network: 2026-01-01", 9, "network", "readers disagree"),
        ("network: flat", "network:", 9, "network", "text"),
        ("network: flat", "network: [a]", 9, "network", "text"),
        ("network: flat", "7: x", 9, "", "field name must be plain text"),
        ("zones: [us-east-1a]", "zones: []", 3, "zones", "at least 1"),
        ("zones: [us-east-1a]", "zones: [a, b, a]", 3, "zones[2]", "named twice"),
        ("zones: [us-east-1a]", "zones: us-east-1a", 3, "zones", "list"),
        ("  - cn-north-1", "  - us-east-1", 6, "failover[0]", "the region itself"),
        ("10.0.0.1:443", "10.0.0.1", 8, "gateways.ingress", "host:port"),
        ("10.0.0.1:443", "10.0.0.1:99999", 8, "gateways.ingress", "host:port"),
        ("ingress:", "entrance:", 8, "gateways.entrance", "unknown field"),
        ("name: us-east-1", "name: us-east-2", 1, "name", "file name"),
        ("name: us-east-1", "name: US", 1, "name", "lower-case"),
        ("primary: false", "primary: true", 7, "primary", "second primary"),
    ],
)
def test_one_mistake_one_message(
    tmp_path: Path, old: str, new: str, line: int, field: str, words: str
) -> None:
    assert old in EAST
    found = problems(write(tmp_path, us_east_1=EAST.replace(old, new), cn_north_1=NORTH))
    assert [(f, at, name) for f, at, name, _ in found] == [("us-east-1.yaml", line, field)]
    assert words in found[0][3]


@pytest.mark.parametrize(
    ("raw", "line", "words"),
    [
        (b"", 0, "empty"),
        (b"# only a comment\n", 0, "empty"),
        (b"just text\n", 1, "mapping"),
        (b"- a\n- b\n", 1, "mapping"),
        (b"name: x\n\tcloud: aws\n", 2, "tab"),
        (b"name: [x\n", 2, "not YAML"),
        (b"name: x\n---\nname: y\n", 2, "not YAML"),
        (b"name: x\nnote: \xff\xfe\n", 2, "UTF-8"),
        (b"name: x\nnote: \x00\n", 2, "control character"),
        (b"a: " + b"[" * 5000 + b"\n", 0, "nested too deeply"),
        (b"a: *nowhere\n", 1, "not YAML"),
        (b"#" * (MAX_BYTES + 1), 0, "larger than"),
    ],
)
def test_what_is_no_region_file_at_all(tmp_path: Path, raw: bytes, line: int, words: str) -> None:
    write(tmp_path, cn_north_1=NORTH)
    (tmp_path / "x.yaml").write_bytes(raw)
    first = problems(tmp_path)[0]
    assert (first[0], first[1]) == ("x.yaml", line)
    assert words in first[3]


def test_a_folder_that_is_missing_empty_or_misnamed(tmp_path: Path) -> None:
    assert problems(tmp_path / "gone") == [("gone", 0, "", "no such folder")]
    assert "no region" in problems(tmp_path)[0][3]
    write(tmp_path, cn_north_1=NORTH)
    (tmp_path / "us-east-1.yml").write_text(EAST)
    (tmp_path / "sub.yaml").mkdir()
    assert [p[0] for p in problems(tmp_path)] == ["sub.yaml", "us-east-1.yml"]


def test_no_primary_and_no_weight(tmp_path: Path) -> None:
    write(tmp_path, cn_north_1=NORTH.replace("primary: true", "primary: false"))
    found = problems(tmp_path)
    assert [(p[2], p[1]) for p in found] == [("primary", 0), ("weight", 5)]


def test_a_secret_in_the_wrong_place_is_never_shown(tmp_path: Path) -> None:
    class Anything(StrictModel):
        name: int

    for text in (
        "token: s3cr3t\n",
        "name: s3cr3t\n",
        "name: *s3cr3t\n",
        "name: !s3cr3t x\n",
        "name: {s3cr3t\n",
    ):
        (tmp_path / "f.yaml").write_text(text)
        with pytest.raises(DataFileError) as caught:
            read_strict(tmp_path / "f.yaml", Anything)
        assert "s3cr3t" not in str(caught.value)


def test_the_schema_is_kept(golden_json: Callable[[str, Any], None]) -> None:
    schema = json_schema()
    golden_json("regions/schema.json", schema)
    assert json.loads(json.dumps(schema)) == schema
    assert schema["additionalProperties"] is False
