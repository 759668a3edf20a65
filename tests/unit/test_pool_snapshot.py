"""The snapshot's bytes: what is kept of a model of any size, that nothing secret is, what is refused."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kv.published import PUBLISHED
from services.pool.snapshot import (
    MAX_BYTES,
    ModelFile,
    ModelParts,
    Snapshot,
    SnapshotRefused,
    changed,
    decode,
    encode,
    foreign,
)  # fmt: skip
from services.pool.verify import Answer
from services.recipe import Recipe


def big_model(layers: int) -> ModelParts:
    names = [f"model.layers.{n}.{part}.weight" for n in range(layers) for part in ("q", "k", "v", "o", "up")]
    table = tuple((n, "BF16", [576, 576], "model.safetensors", i, i + 1) for i, n in enumerate(names))
    return ModelParts("/m", {"layers": layers}, (ModelFile("model.safetensors", 9, "sha256:00"),), table)


SNAPSHOT = Snapshot(
    identity={
        "service": "chat",
        "instance": "s0",
        "region": "us",
        "stage": "stable",
        "version": "7",
        "model": "m",
    },
    facts={"name": "torch", "model": "m", "context": 2048, "kv_block": 16},
    recipe=Recipe("torch", "m", {"dtype": "float32"}),
    device="GPU-0",
    level=1,
    prompt="hi",
    answer=Answer((1, 2, 3), "one two three"),
    held=300,
    asleep=10,
    taken_at=1_800_000_000,
    model=big_model(3),
)


@given(
    st.builds(
        Snapshot,
        identity=st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=4),
        facts=st.dictionaries(st.text(max_size=9), st.integers() | st.text(max_size=9), max_size=4),
        recipe=st.builds(
            Recipe, st.text(max_size=9), options=st.dictionaries(st.text(), st.text(), max_size=4)
        ),
        device=st.text(max_size=9),
        level=st.integers(1, 2),
        prompt=st.text(max_size=40),
        answer=st.builds(Answer, st.lists(st.integers(-1, 2**31)).map(tuple), st.text(), st.text()),
        held=st.integers(0, 2**45),
        model=st.integers(0, 3).map(big_model),
    )
)
def test_a_snapshot_comes_back_as_it_was(snapshot: Snapshot) -> None:
    raw = encode(snapshot)
    assert len(raw) <= MAX_BYTES
    assert decode(raw) == snapshot


def table_of(config: Mapping[str, Any], experts: int = 0, shards: int = 1) -> ModelParts:
    """A model's files and tensors as its shape has them; the weights need not be here."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    kv = config.get("head_dim", width // config["num_attention_heads"]) * config["num_key_value_heads"]
    layer = {
        "input_layernorm": [width], "post_attention_layernorm": [width], "self_attn.k_proj": [kv, width],
        "self_attn.v_proj": [kv, width], "self_attn.o_proj": [width, width],
        "self_attn.q_proj": [width, width],
    }  # fmt: skip
    for block in [f"mlp.experts.{n}" for n in range(experts)] or ["mlp"]:
        layer |= {f"{block}.down_proj": [width, inner], f"{block}.gate_proj": [inner, width]}
        layer |= {f"{block}.up_proj": [inner, width]}
    count = config["num_hidden_layers"]
    names = [f"model-{n + 1:05d}-of-{shards:05d}.safetensors" for n in range(shards)]
    rows, at = [("model.embed_tokens.weight", "BF16", [config["vocab_size"], width], names[0], 0, 9)], 9
    for n in range(count):
        for part, shape in layer.items():
            file, size = names[n * shards // count], 2 * math.prod(shape)
            rows.append((f"model.layers.{n}.{part}.weight", "BF16", shape, file, at, at + size))
            at += size
    files = tuple(
        ModelFile(name, 2**32, "sample:" + hashlib.sha256(name.encode()).hexdigest()) for name in names
    )
    return ModelParts("/models/m", config, files, tuple(rows))


DEEPSEEK = {**PUBLISHED["llama-3.1-70b"], "num_hidden_layers": 61, "vocab_size": 129280}


@pytest.mark.parametrize(
    ("model", "rows"),
    [
        (table_of(PUBLISHED["smollm2-135m"]), 271),
        (table_of(PUBLISHED["llama-3.1-8b"], shards=4), 289),
        (table_of(PUBLISHED["llama-3.1-70b"], shards=30), 271),
        (table_of({**PUBLISHED["llama-3.1-70b"], "num_hidden_layers": 126}, shards=191), 10),
        (table_of(DEEPSEEK, experts=256, shards=163), 10),
    ],
    ids=["135M", "8B", "70B", "405B", "671B in 46,000 experts"],
)
def test_the_snapshot_of_a_real_model_is_within_12_and_45_kb_and_plain(model: ModelParts, rows: int) -> None:
    """As many rows of tensors as there is room for, counted where there are too many; all files."""
    raw = encode(replace(SNAPSHOT, model=model))
    assert 12 * 1024 <= len(raw) <= 45 * 1024
    found = decode(raw).model
    assert (found.files, found.config, len(found.tensors)) == (model.files, model.config, rows)
    if rows < len(model.tensors):
        assert sum(row[4] for row in found.tensors) == len(model.tensors), "none is left out"
    assert json.loads(raw.partition(b"\n")[2])["answer"]["text"] == "one two three", "a person can read it"


def test_what_can_not_be_bounded_is_refused() -> None:
    noise = tuple((hashlib.sha256(b"%d" % n).hexdigest(), "F32", [1], "x", n, n) for n in range(3000))
    with pytest.raises(SnapshotRefused, match="more than 46080"):
        encode(replace(SNAPSHOT, model=ModelParts(tensors=noise)))


RAW = encode(SNAPSHOT)


def with_head(field: int, value: str) -> bytes:
    head, _, body = RAW.partition(b"\n")
    words = head.decode().split(" ")
    words[field] = value
    return " ".join(words).encode() + b"\n" + body


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "foreign"),
        (b"\x00" * 5000, "foreign"),
        (b'{"hello": 1}\n', "foreign"),
        (with_head(1, "1"), "version 1"),
        (RAW[:-1], "cut off"),
        (RAW + b"x", "cut off"),
        (RAW[:-20] + b"#" + RAW[-19:], "corrupt"),
    ],
)
def test_a_foreign_or_broken_snapshot_is_refused_by_name(raw: bytes, why: str) -> None:
    with pytest.raises(SnapshotRefused, match=why) as raised:
        decode(raw, "run/s0.snapshot")
    assert "run/s0.snapshot" in str(raised.value)


@given(st.data())
def test_no_changed_byte_goes_unnoticed(data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(RAW) - 1))
    other = data.draw(st.integers(0, 255).filter(lambda b: b != RAW[place]))
    changed = RAW[:place] + bytes([other]) + RAW[place + 1 :]
    with pytest.raises(SnapshotRefused):
        decode(changed)


def test_a_body_that_lacks_a_field_is_refused() -> None:
    body = json.loads(RAW.partition(b"\n")[2])
    del body["prompt"]
    raw = json.dumps(body).encode()
    head = f"WEIR-SNAPSHOT 2 {hashlib.sha256(raw).hexdigest()} {len(raw)}\n".encode()
    with pytest.raises(SnapshotRefused, match="prompt"):
        decode(head + raw)


def test_another_instances_snapshot_is_told_apart() -> None:
    assert foreign(SNAPSHOT, SNAPSHOT.identity, SNAPSHOT.facts) == ""
    assert "version" in foreign(SNAPSHOT, {**SNAPSHOT.identity, "version": "8"}, SNAPSHOT.facts)
    assert "context" in foreign(SNAPSHOT, SNAPSHOT.identity, {**SNAPSHOT.facts, "context": 1})


def test_a_file_of_the_model_that_is_another_one_now_is_named() -> None:
    before = big_model(1)
    [file] = before.files
    assert changed(before, replace(before, files=(ModelFile("new.json", 1, "x"), file))) == ""
    assert "is gone" in changed(before, replace(before, files=()))
    other = changed(before, replace(before, files=(replace(file, digest="sha256:01"),)))
    assert other.startswith("model.safetensors")


def test_secrets_stay_out_and_come_back_from_who_was_told_them() -> None:
    options = {"base_url": "u", "hf_token": "hush", "api_key_env": "KEY"}
    options |= {"args": "--seed 3 --api-key hush", "more": "--max-num-batched-tokens 8"}
    told = Recipe("openai", "m", options, "sim", {"key": "h"})
    kept = told.public()
    plain = {"base_url": "u", "api_key_env": "KEY", "more": "--max-num-batched-tokens 8"}
    assert dict(kept.options) == plain, "a variable's name is no secret, nor is a count of tokens"
    assert kept.fallback_options == {}
    assert kept.with_secrets_of(told) == told
