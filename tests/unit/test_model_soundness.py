"""`weir model verify`: what is wrong with a folder is named, whether it has sums or not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from services.models import cli
from services.models.soundness import verify
from services.weights.faults import WeightsError
from tests.weights_samples import random_tensors, save_sharded

pytestmark = pytest.mark.torch
TOKENIZER, CONFIG = "tokenizer.json", "config.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of two shards, without sums."""
    save_sharded(tmp_path, random_tensors(5), 2)
    (tmp_path / CONFIG).write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / TOKENIZER).write_text(json.dumps({"version": "1.0", "model": {"vocab": {"a": 0}}}))
    return tmp_path


@pytest.fixture
def summed(folder: Path) -> Path:
    from services.weights import sums

    sums.write(folder)
    return folder


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def _another(path: Path) -> None:
    """Still JSON, so that only its sum tells."""
    path.write_text(json.dumps({"model_type": "gpt2"}))


def test_what_is_whole_is_said_to_be(summed: Path) -> None:
    found = verify(summed)
    assert (found["verdict"], found["shards"]) == ("as prepared", 2)
    assert found["files"] == 3, "config, tokenizer and the index of the shards"


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        (CONFIG, _cut, "is no JSON"),
        (CONFIG, _another, "changed on disk"),
        (CONFIG, lambda path: path.write_text("[]"), "holds a list, not an object"),
        (TOKENIZER, _cut, "changed on disk"),
        (TOKENIZER, _another, "changed on disk"),
        (TOKENIZER, Path.unlink, "not in "),
    ],
)
def test_a_damaged_file_beside_the_weights_is_named(
    summed: Path, name: str, damage: Callable[[Path], object], said: str
) -> None:
    damage(summed / name)
    with pytest.raises(WeightsError) as caught:
        verify(summed)
    assert caught.value.what == f"file {name}"
    assert said in caught.value.why


def test_a_folder_from_elsewhere_has_its_files_parsed(folder: Path) -> None:
    assert "nothing to compare with" in verify(folder)["verdict"]
    _cut(folder / TOKENIZER)
    with pytest.raises(WeightsError, match="is no JSON"):
        verify(folder)


def test_one_that_we_prepared_has_a_tokenizer(folder: Path) -> None:
    (folder / TOKENIZER).unlink()
    assert verify(folder)["shards"] == 2, "an engine may bring another tokenizer"
    (folder / "weir.json").write_text(json.dumps({"name": "m"}))
    with pytest.raises(WeightsError, match="where `weir model prepare` put it"):
        verify(folder)


def test_the_command_prints_counts(summed: Path) -> None:
    app = typer.Typer()
    cli.register(app)
    done = CliRunner().invoke(app, ["model", "verify", str(summed), "--json"])
    assert (done.exit_code, json.loads(done.stdout)["files"]) == (0, 3)
