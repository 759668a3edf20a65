"""Shards → GPU without host memory in between, by the library fastsafetensors where it and cuFile are.

Law: imports the library only when asked; says Unusable where it can't do it, so that the portable way is
taken. Checksums are compared here too: read back from the device, which is faster than any disk.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from mesh.clock import Clock
from services.weights import sums
from services.weights.folder import Folder, Shard
from services.weights.load import Report
from services.weights.meter import Meter, Progress
from services.weights.plan import Piece, plan

log = logging.getLogger("weir.weights")

LIBRARY = "fastsafetensors"


class Unusable(Exception):
    """The library is there and yet can't: why."""


def usable(index: int = 0) -> bool:
    """Whether library, cuFile and driver are there for this GPU."""
    if find_spec(LIBRARY) is None:
        return False
    try:
        cpp: Any = import_module(f"{LIBRARY}.cpp")
        import_module(LIBRARY)
        return bool(cpp.is_cuda_found() and cpp.is_cufile_found() and cpp.is_gds_supported(index) == 1)
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        log.info("%s can't be used: %s", LIBRARY, error)
        return False


def load(
    folder: Folder,
    tensors: Mapping[str, torch.Tensor],
    device: torch.device,
    progress: Progress | None,
    clock: Clock,
    *,
    gds: bool = True,
) -> Report:
    """Fill `tensors` on `device`, one shard at a time: that much memory more is needed meanwhile.

    gds: without it the library goes by way of the host (for tests). Raises Unusable, WeightsError.
    """
    known = sums.read(folder.path)
    cut = plan(folder.facts, known.blocks, known.piece) if known else ()
    pieces: dict[str, list[Piece]] = {}
    for block in cut:
        for piece in block:
            pieces.setdefault(piece.tensor, []).append(piece)
    checker = sums.Checker(folder, known)
    total = sum(fact.nbytes for fact in folder.facts)
    meter = Meter(folder.path.name, total, progress, clock)
    for name in sorted(folder.shards):
        shard = folder.shards[name]
        for tensor, raw in _tensors(shard, device, gds):
            data = raw.contiguous().view(-1)
            for piece in pieces.get(tensor, ()):
                part = data.view(torch.uint8)[piece.offset : piece.offset + piece.stop - piece.start]
                checker.piece(piece, part.cpu().numpy().data)
            tensors[tensor].view(-1).copy_(data)
            meter.add(data.nbytes)
    report = Report("gpudirect", total, meter.seconds, known is not None)
    log.info("%s: %s", folder.path, report)
    return report


def _tensors(shard: Shard, device: torch.device, gds: bool) -> list[tuple[str, torch.Tensor]]:
    try:
        library: Any = import_module(LIBRARY)
        loader = library.SafeTensorsFileLoader(None, str(device), nogds=not gds)
        try:
            loader.add_filenames({0: [str(shard.path)]})
            # The tensors own the memory: it goes with the last of them.
            buffer = loader.copy_files_to_device()
            found = [(fact.tensor, buffer.get_tensor(fact.tensor)) for fact in shard.facts]
            buffer.close()
        finally:
            loader.close()
    except (ImportError, OSError, RuntimeError, ValueError, KeyError) as error:
        raise Unusable(f"{shard.path.name}: {error}") from error
    return found
