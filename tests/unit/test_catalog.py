"""The service catalog: chat as shipped, defaults, and mistakes with file, line and field."""

from __future__ import annotations

from pathlib import Path

import pytest

from mesh.catalog import load_services
from mesh.model import RateLimitSpec, ServiceSpec
from regions.yamlfile import DataFileError

SHIPPED = Path(__file__).parents[2] / "services" / "catalog"


def test_chat_as_shipped() -> None:
    (chat,) = load_services(SHIPPED)
    assert (chat.name, chat.prefix, chat.capacity_rps) == ("chat", "/chat", 300.0)
    assert (chat.first_byte_timeout_s, chat.idle_timeout_s) == (2.0, 60.0)
    assert chat.rate_limit == RateLimitSpec(5_000, 10_000, 1)


def test_what_is_left_out_has_the_models_defaults(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("name: a\nprefix: /a\n")
    assert load_services(tmp_path) == (ServiceSpec(name="a", prefix="/a"),)


@pytest.mark.parametrize(
    ("text", "line", "field", "words"),
    [
        ("name: a\n", 1, "prefix", "missing"),
        ("name: b\nprefix: /a\n", 1, "name", "file name"),
        ("name: a\nprefix: a\n", 2, "prefix", "starts with '/'"),
        ("name: a\nprefix: /a/\n", 2, "prefix", "path"),
        ("name: a\nprefix: /a/../b\n", 2, "prefix", "path"),
        ("name: a\nprefix: /\n", 2, "prefix", "path"),
        ("name: a\nprefix: /a\nidle_timeout_s: 0\n", 3, "idle_timeout_s", "greater than 0"),
        ("name: a\nprefix: /a\nidle_timeout_s: 1\n", 1, "first_byte_timeout_s", "idle_timeout_s"),
        ("name: a\nprefix: /a\nretry:\n  attempts: 0\n", 4, "retry.attempts", "greater than or equal to 1"),
        ("name: a\nprefix: /a\nretry:\n  attempts: 1.5\n", 4, "retry.attempts", "integer"),
        ("name: a\nprefix: /a\nrate_limit: {burst: 1}\n", 3, "rate_limit.burst", "requests_per_second"),
        ("name: a\nprefix: /a\ndye_header: yes\n", 3, "dye_header", "readers disagree"),
        ("name: a\nprefix: /a\nport: 1\n", 3, "port", "unknown field"),
    ],
)
def test_one_mistake_one_message(tmp_path: Path, text: str, line: int, field: str, words: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(DataFileError) as caught:
        load_services(tmp_path)
    (problem,) = caught.value.problems
    assert (Path(problem.file).name, problem.line, problem.field) == ("a.yaml", line, field)
    assert words in problem.reason


def test_two_services_cannot_share_a_prefix(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.yaml").write_text(f"name: {name}\nprefix: /same\n")
    with pytest.raises(DataFileError, match=r"b\.yaml:2: prefix: /same belongs to service a already"):
        load_services(tmp_path)


def test_an_empty_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataFileError, match="no service"):
        load_services(tmp_path)
