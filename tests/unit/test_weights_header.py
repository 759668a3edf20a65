"""The header of a safetensors file as we read it, against what safetensors itself says; and what is none."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from services.weights.header import entries


@pytest.mark.torch
def test_it_says_what_safetensors_says(tmp_path: Path) -> None:
    from safetensors import safe_open

    from services.weights.folder import read_shard
    from tests.weights_samples import random_tensors, save_sharded

    save_sharded(tmp_path, random_tensors(3), 2)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 2
    for path in files:
        found = entries(path)
        with safe_open(path, framework="numpy") as opened:
            assert [entry.name for entry in found] == list(opened.offset_keys())
            for entry in found:
                part = opened.get_slice(entry.name)
                assert (entry.dtype, list(entry.shape)) == (part.get_dtype(), list(part.get_shape()))
        shard = read_shard(path)
        assert [(f.start - shard.header, f.stop - shard.header) for f in shard.facts] == [
            (entry.begin, entry.end) for entry in found
        ]


NONE = {
    "empty": b"",
    "too long": b"\xff" * 8,
    "cut off": struct.pack("<Q", 90) + b'{"a":',
    "a list": struct.pack("<Q", 2) + b"[]",
    "no offsets": struct.pack("<Q", 8) + b'{"a":{}}',
    "three offsets": struct.pack("<Q", 55) + b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}}',
    "no UTF-8": struct.pack("<Q", 2) + b"\xff\xfe",
}


@pytest.mark.parametrize("name", NONE)
def test_what_is_no_header(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(NONE[name])
    with pytest.raises(ValueError, match="header"):
        entries(path)


def test_it_is_sorted_by_place_and_what_is_no_tensor_is_left_out(tmp_path: Path) -> None:
    row = {"dtype": "U8", "shape": [2]}
    body = {"b": {**row, "data_offsets": [2, 4]}, "a": {**row, "data_offsets": [0, 2]}}
    text = json.dumps({"__metadata__": {"format": "pt"}, **body}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    assert [(e.name, e.shape, e.begin, e.end) for e in entries(path)] == [
        ("a", (2,), 0, 2),
        ("b", (2,), 2, 4),
    ]
