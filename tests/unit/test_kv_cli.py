"""`weir kv plan`: the printed plan is a golden, mistakes name the way out, and torch is never loaded."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from regions.cli.errors import Exit, UsageError, WeirError
from services.kv import cli
from services.kv.published import PUBLISHED
from services.kv.shape import dtype_name

GEMMA_LIKE = {
    "model_type": "gemma3_text",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 6,
    "hidden_size": 1152,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "sliding_window": 512,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
}


@pytest.fixture(autouse=True)
def empty_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies on this machine must not decide."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def weir(*args: str) -> tuple[int, str]:
    app = typer.Typer()
    cli.register(app)
    result = CliRunner().invoke(app, ["kv", *args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def plan(model: str, context: str, memory: str, *more: str) -> tuple[int, str]:
    return weir("plan", "--model", model, "--context", context, "--memory", memory, *more)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("llama-3.1-8b-24gib", ("llama-3.1-8b", "8K", "24GiB", "--sequences")),
        ("llama-3.1-70b-fp8", ("llama-3.1-70b", "131072", "141GB", "--weights", "70GB", "--kv-dtype", "fp8")),
        ("mistral-window", ("mistral-7b-v0.1", "32768", "24GiB", "--reserve", "2GiB")),
        ("mistral-keep-all", ("mistral-7b-v0.1", "32768", "24GiB", "--window", "0")),
        ("smollm2-none-fits", ("smollm2-135m", "8192", "64MiB", "--weights", "none")),
    ],
)
def test_the_printed_plan(name: str, args: tuple[str, ...], golden: Callable[[str, str], None]) -> None:
    code, text = plan(*args)
    golden(f"kv/{name}.txt", text)
    assert code == (Exit.FAILED if "none-fits" in name else Exit.DONE)


def test_the_plan_as_json(golden_json: Callable[[str, Any], None]) -> None:
    code, text = plan("llama-3.1-8b", "8192", "24GiB", "--json", "--sequences")
    body = json.loads(text)
    golden_json("kv/llama-3.1-8b-24gib.json", body)
    assert (code, body["schema_version"]) == (0, 1)
    assert body["sequences"] * body["bytes_per_sequence"] <= body["memory"]["for_kv"]


def test_layers_of_two_kinds_are_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(GEMMA_LIKE))
    code, text = plan(str(file), "32768", "8GiB", "--weights", "none")
    assert code == 0
    assert "5 of 6 layers have a window" in text


def a_shard(file: Path, header: dict[str, Any]) -> None:
    raw = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw)  # no weights: nobody may need them


@pytest.mark.parametrize(
    ("dtype", "weights"), [("auto", 1000 + 500 + 7), ("fp32", 1000 + 1000 + 7), ("bf16", 1007)]
)
def test_the_weights_of_a_folder_are_counted_without_reading_them(
    tmp_path: Path, dtype: str, weights: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["smollm2-135m"]))
    whole = {"dtype": "F32", "shape": [25, 10], "data_offsets": [0, 1000]}
    half = {"dtype": "BF16", "shape": [250], "data_offsets": [0, 500]}
    other = {"dtype": "U8", "shape": [7], "data_offsets": [500, 507]}
    a_shard(tmp_path / "model-00001-of-00002.safetensors", {"a": whole, "__metadata__": {"format": "pt"}})
    a_shard(tmp_path / "model-00002-of-00002.safetensors", {"b": half, "c": other})
    body = json.loads(plan(str(tmp_path), "100", "1GiB", "--json", "--dtype", dtype)[1])
    assert body["memory"]["weights"] == weights
    assert body["shape"]["dtype"] == ("bfloat16" if dtype == "auto" else dtype_name(dtype))


@pytest.mark.parametrize(
    "raw", [b"", b"\xff" * 8, struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 9) + b'{"a":{}}']
)
def test_a_file_of_weights_that_is_none_is_named(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["smollm2-135m"]))
    (tmp_path / "model.safetensors").write_bytes(raw)
    with pytest.raises(UsageError, match=r"model\.safetensors.*no safetensors header"):
        plan(str(tmp_path), "100", "1GiB")


def test_the_type_it_runs_in_counts_for_weights_and_cache() -> None:
    body = json.loads(plan("smollm2-135m", "100", "1GiB", "--json", "--dtype", "fp32")[1])
    assert body["memory"]["weights"] == 4 * 134_515_008
    assert body["bytes_per_token"] == 2 * 23_040
    body = json.loads(
        plan("smollm2-135m", "100", "1GiB", "--json", "--dtype", "fp32", "--kv-dtype", "fp8")[1]
    )
    assert body["bytes_per_token"] == 23_040 // 2


def test_a_context_beyond_the_models_own_is_said() -> None:
    app = typer.Typer()
    cli.register(app)
    args = ["kv", "plan", "--model", "smollm2-135m", "--context", "9000", "--memory", "8GiB"]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0
    assert "8,192 tokens only" in result.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("nobody-7b", "100", "8GiB"), "llama-3.1-8b"),
        (("", "100", "8GiB"), "name a model"),
        (("smollm2-135m-instruct", "100", "8GiB"), "weir model prepare"),
        (("./nowhere", "100", "8GiB"), "no such folder"),
        (("llama-3.1-8b", "0", "24GiB"), "--context 0"),
        (("llama-3.1-8b", "-5", "24GiB"), "--context -5"),
        (("llama-3.1-8b", "long", "24GiB"), "no number of tokens"),
        (("llama-3.1-8b", "100", "big"), "8GiB"),
        (("llama-3.1-8b", "100", "24GiB", "--block", "0"), "--block 0"),
        (("llama-3.1-8b", "100", "24GiB", "--chunk", "0"), "--chunk 0"),
        (("llama-3.1-8b", "100", "24GiB", "--window", "-2"), "--window -2"),
        (("llama-3.1-8b", "100", "24GiB", "--kv-dtype", "q4"), "known: fp32"),
        (("llama-3.1-8b", "100", "24GiB", "--dtype", "q4"), "--dtype"),
        (("llama-3.1-8b", "100", "24GiB", "--weights", "some"), "--weights"),
        (("llama-3.1-8b", "100", "9999999PiB"), "up to 1 PiB"),
    ],
)
def test_a_mistake_names_the_way_out(args: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan(*args)
    assert words in str(caught.value)


def test_memory_smaller_than_the_weights() -> None:
    with pytest.raises(WeirError, match=r"weights 14\.96 GiB") as caught:
        plan("llama-3.1-8b", "8192", "8GiB")
    assert caught.value.exit_code == Exit.FAILED
    assert "--weights none" in caught.value.way_out


@pytest.mark.parametrize(("text", "words"), [("{", "not JSON"), ("[]", "not a JSON object"), ("{}", "num_")])
def test_a_config_that_is_none(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=words):
        plan(str(file), "100", "8GiB", "--weights", "none")


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"config\.json"):
        plan(str(tmp_path), "100", "8GiB")


def test_unknown_weights_are_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(GEMMA_LIKE))
    with pytest.raises(UsageError, match="--weights SIZE"):
        plan(str(file), "100", "8GiB")


def test_the_shapes_it_knows() -> None:
    code, text = weir("shapes", "--json")
    assert (code, {row["name"] for row in json.loads(text)["shapes"]}) == (0, set(PUBLISHED))
    assert "llama-3.1-8b" in weir("shapes")[1]


def test_torch_is_never_loaded() -> None:
    code = (
        "import sys\n"
        "from services.kv import cli\n"
        "try:\n"
        "    cli.plan_('llama-3.1-8b', '8192', '24GiB')\n"
        "except BaseException as end: assert type(end).__name__ == 'Exit', end\n"
        "heavy = {'torch', 'safetensors', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
