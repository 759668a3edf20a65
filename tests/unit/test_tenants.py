"""The table of tenants and its file."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regions.cli.errors import UsageError
from services.tenants import DEFAULT, OTHER, Tenants
from services.tenants_file import FILE, load

GOOD = """\
classes:
  - {name: gold, priority: 0}
  - {name: silver, priority: 1}
tenants:
  - {name: default, class: silver}
  - {name: acme, class: gold}
"""


def test_the_file_of_the_house_has_the_three_classes_in_order() -> None:
    table = load(FILE)
    assert sorted(table.priorities, key=table.priorities.__getitem__) == ["gold", "silver", "bronze"]
    assert table.of(None).tenant_class == "silver"


def test_who_is_known_and_who_is_not(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(GOOD)
    table = load(path)
    acme = table.of("acme")
    assert (acme.name, acme.tenant_class, acme.priority, acme.label) == ("acme", "gold", 0, "acme")
    for name in (None, ""):
        assert (table.of(name).name, table.of(name).label) == (DEFAULT, DEFAULT)
    assert (table.of("evil").name, table.of("evil").label, table.of("evil").tenant_class) == (
        DEFAULT,
        OTHER,
        "silver",
    )


@given(st.lists(st.text(max_size=8), max_size=50))
def test_labels_are_bounded_whatever_clients_call_themselves(names: list[str]) -> None:
    table = Tenants({"s": 0}, {DEFAULT: "s", "acme": "s"})
    assert {table.of(name).label for name in names} <= set(table.labels)
    assert len(table.labels) == 3


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("class: gold", "class: platinum", "line 6: tenants[1].class: no such class"),
        ("name: acme", "name: default", "line 6: tenants[1].name: twice"),
        ("name: acme", "name: other", "counted as"),
        ("name: acme", "name: ACME", "line 6: tenants[1].name: must be of a-z"),
        ("name: default", "name: usual", "needs a row 'default'"),
        ("priority: 1", "priority: -1", "line 3: classes[1].priority: must be a whole number"),
        ("priority: 1", "priority: '1'", "line 3: classes[1].priority"),
        ("priority: 1", "priority: true", "line 3: classes[1].priority"),
        ("priority: 1", "prio: 1", "line 3: classes[1]: needs the fields"),
        ("name: silver", "name: gold", "line 3: classes[1].name: twice"),
        ("classes:", "klasses:", "needs the lists"),
        ("  - {name: acme, class: gold}", "  - acme", "line 6: tenants[1]: needs the fields"),
        ("  - {name: acme, class: gold}", "  - {name: acme, class: 0x10}", "line 6"),
        (GOOD, "", "empty"),
        (GOOD, "classes: [\n", "not YAML"),
        (GOOD, "[" * 5000, "not YAML"),
        (GOOD, "classes: {}\ntenants: []\n", "line 1: classes: must be a list"),
    ],
)
def test_what_is_wrong_is_named_by_file_line_and_field(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(UsageError) as caught:
        load(path)
    assert caught.value.what == str(path)
    assert said in caught.value.why


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        load(tmp_path / "none.yaml")
    (tmp_path / "x").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not YAML"):
        load(tmp_path / "x")
