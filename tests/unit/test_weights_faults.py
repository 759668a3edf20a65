"""Wrong files of weights: every error names the shard, the figures and the way out."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch


def _model(folder: Path, shards: int) -> list[Path]:
    from tests.weights_samples import random_tensors, save_sharded

    return save_sharded(folder, random_tensors(1), shards)


def _fails(folder: Path) -> str:
    """What loading says, as a person reads it. Reading it all must fail, whatever part is wrong."""
    from services.weights.faults import WeightsError
    from services.weights.sums import verify

    with pytest.raises(WeightsError) as caught:
        verify(folder)
    assert caught.value.way_out
    return str(caught.value)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    paths = _model(tmp_path, 3)
    paths[1].unlink()
    said = _fails(tmp_path)
    assert f"shard {paths[1].name}" in said
    assert "6 tensor(s)" in said


def test_a_truncated_shard_tells_both_sizes_and_the_tensor(tmp_path: Path) -> None:
    paths = _model(tmp_path, 2)
    size = paths[1].stat().st_size
    with paths[1].open("r+b") as file:
        file.truncate(size - 100)
    said = _fails(tmp_path)
    assert f"shard {paths[1].name}: cut off: {size - 100} bytes, its header says {size}" in said
    assert "first tensor that is not whole: " in said


def test_bytes_too_many_are_told_too(tmp_path: Path) -> None:
    (path,) = _model(tmp_path, 1)
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"0123456789")
    assert f"too long: {size + 10} bytes, its header says {size}" in _fails(tmp_path)


@pytest.mark.parametrize("cut", [0, 5, 8, 50])
def test_a_file_cut_off_inside_its_header(tmp_path: Path, cut: int) -> None:
    (path,) = _model(tmp_path, 1)
    with path.open("r+b") as file:
        file.truncate(cut)
    said = _fails(tmp_path)
    assert "model.safetensors: its header can't be read" in said
    assert f"{cut} bytes" in said


@pytest.mark.parametrize(
    "junk", [b"\xff" * 40, b"\x00" * 40, struct.pack("<Q", 10) + b'{"a": [1,2' + b"x" * 30]
)
def test_a_header_of_junk(tmp_path: Path, junk: bytes) -> None:
    (path,) = _model(tmp_path, 1)
    path.write_bytes(junk)
    assert "model.safetensors: its header can't be read" in _fails(tmp_path)


def test_a_header_whose_offsets_overlap(tmp_path: Path) -> None:
    (path,) = _model(tmp_path, 1)
    header = json.dumps({n: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for n in "ab"}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"12345678")
    assert "model.safetensors: its header can't be read" in _fails(tmp_path)


def test_an_index_that_puts_a_tensor_where_it_is_not(tmp_path: Path) -> None:
    paths = _model(tmp_path, 2)
    index = tmp_path / "model.safetensors.index.json"
    body = json.loads(index.read_text())
    body["weight_map"]["model.ghost.weight"] = paths[0].name
    index.write_text(json.dumps(body))
    assert f"shard {paths[0].name}: holds no tensor model.ghost.weight" in _fails(tmp_path)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "../b.safetensors"}}']
)
def test_an_index_that_makes_no_sense(tmp_path: Path, text: str) -> None:
    _model(tmp_path, 2)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in _fails(tmp_path)


def test_no_weights_at_all_and_weights_of_another_format(tmp_path: Path) -> None:
    assert "no model.safetensors" in _fails(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "only model.gguf" in _fails(tmp_path)


def test_several_files_without_an_index(tmp_path: Path) -> None:
    _model(tmp_path, 2)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert "no model.safetensors.index.json" in _fails(tmp_path)


def test_a_dtype_that_needs_scales_is_refused_by_name(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"w": torch.zeros(4).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    said = _fails(tmp_path)
    assert "tensor w is F8_E4M3" in said
    assert "bfloat16" in said


@pytest.mark.parametrize("shards", [1, 3])
def test_one_flipped_bit_is_found_and_named(tmp_path: Path, shards: int) -> None:
    from services.weights import sums

    path = _model(tmp_path, shards)[-1]
    assert sums.write(tmp_path) == shards
    assert sums.verify(tmp_path)["checked"]
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    said = _fails(tmp_path)
    assert f"shard {path.name}: tensor " in said
    assert "changed on disk: checksum" in said


def test_a_changed_header_is_found(tmp_path: Path) -> None:
    from services.weights import sums

    (path,) = _model(tmp_path, 1)
    sums.write(tmp_path)
    # The names of two tensors of one shape swapped: every size still fits.
    data = path.read_bytes().replace(b"input_layernorm", b"other_layernorm")
    path.write_bytes(data)
    assert "its header changed on disk" in _fails(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", '{"schema_version": 9, "algorithm": "xxh3_128"}'])
def test_sums_that_make_no_sense(tmp_path: Path, text: str) -> None:
    _model(tmp_path, 1)
    (tmp_path / "weights.sum.json").write_text(text)
    assert "weights.sum.json: can't be read" in _fails(tmp_path)


def test_a_shard_that_the_sums_dont_know(tmp_path: Path) -> None:
    from services.weights import sums
    from tests.weights_samples import random_tensors, save_sharded

    _model(tmp_path, 1)
    sums.write(tmp_path)
    save_sharded(tmp_path, random_tensors(2, width=25), 1)
    assert "model.safetensors" in _fails(tmp_path)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    from services.weights.faults import WeightsError
    from services.weights.folder import read_folder
    from services.weights.plan import plan, spans
    from services.weights.read import Reader
    from services.weights.sources import Way

    (path,) = _model(tmp_path, 1)
    folder = read_folder(tmp_path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    for way in Way:
        with pytest.raises(WeightsError, match=r"shard model.safetensors: can't be read"):
            for _ in Reader(folder.paths, way=way).stream(spans(plan(folder.facts)), lambda span, view: None):
                pass
