"""GGUF → safetensors, tokenizer, config: `python -m services.models.gguf FILE FOLDER`.

Law: a process of its own, so that torch and transformers never enter the command that asked, and what they
read from the environment is ours to say. Offline. One JSON object on stdout at the end: which versions did
it.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

_READABLE = 0o644


def convert(source: Path, folder: Path) -> dict[str, str]:
    """Write the model of a GGUF file into `folder`, as bfloat16. Returns the versions of what did it.

    Raises whatever transformers raises: the caller shows the last line.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
    # What we write is no GGUF any more; left in, loaders would look for the file it names.
    model.__dict__.pop("hf_quantizer", None)
    for gone in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        model.config.__dict__.pop(gone, None)
    model.save_pretrained(folder, max_shard_size="4GB")
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(_READABLE)
    return {name: version(name) for name in ("torch", "transformers", "gguf")}


if __name__ == "__main__":
    made_by = convert(Path(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.write(json.dumps(made_by) + "\n")
