"""Small models on disk for tests of loading: random tensors, one file or several with an index.

Law: seeded; writes only into the folder it is given. Imports torch: for tests marked so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from services.weights.folder import INDEX, SINGLE

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def random_tensors(
    seed: int, layers: int = 3, width: int = 24, dtypes: Sequence[torch.dtype] = DTYPES
) -> dict[str, torch.Tensor]:
    """A handful per layer, of several shapes and dtypes, odd sizes included."""
    dice = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (101, width)}
    for layer in range(layers):
        shapes[f"model.layers.{layer}.self_attn.q_proj.weight"] = (width, width)
        shapes[f"model.layers.{layer}.mlp.up_proj.weight"] = (3 * width + 1, width)
        shapes[f"model.layers.{layer}.input_layernorm.weight"] = (width,)
    shapes |= {"model.norm.weight": (width,), "lm_head.weight": (101, width), "scale": ()}
    found = {
        name: torch.randn(shape, generator=dice).to(dtypes[number % len(dtypes)])
        for number, (name, shape) in enumerate(shapes.items())
    }
    return found | {"steps": torch.arange(7), "mask": torch.tensor([True, False]), "none": torch.empty(0, 4)}


def save_sharded(folder: Path, tensors: Mapping[str, torch.Tensor], shards: int) -> list[Path]:
    """As transformers names them: one file, or several and an index."""
    names = list(tensors)
    each = math.ceil(len(names) / shards)
    groups = [names[at : at + each] for at in range(0, len(names), each)]
    if len(groups) == 1:
        save_file(dict(tensors), folder / SINGLE)
        return [folder / SINGLE]
    paths: list[Path] = []
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        path = folder / f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        save_file({name: tensors[name] for name in group}, path)
        weight_map |= dict.fromkeys(group, path.name)
        paths.append(path)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return paths
