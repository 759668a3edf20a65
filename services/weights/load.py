"""Shards → tensors in the run dtype, wherever these lie: read in parallel, checked, converted.

Law: the destination is given; this reads, checks and converts, all in the reading threads. It converts in
slices so small that torch doesn't spread them over a crew of its own: each of our threads would start one,
and crews that wait in a loop for the next slice took four times as much processor time as the copying.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mesh.clock import Clock, SystemClock
from services.weights import sums
from services.weights.folder import Folder
from services.weights.meter import Meter, Progress
from services.weights.plan import ITEM_BYTES, Span, plan, spans
from services.weights.read import Choice, Reader
from services.weights.sources import Way

log = logging.getLogger("weir.weights")

SLICE = 16384
"""Elements; half of what torch (at::internal::GRAIN_SIZE) thinks worth more than one thread."""

TORCH: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class Report:
    """How loading went. nbytes: read; source: "shards", "parked file" or "gpudirect"; choice: None where
    there was none; checked: whether checksums were there to compare with.
    """

    source: str
    nbytes: int
    seconds: float
    checked: bool
    choice: Choice | None = None

    def __str__(self) -> str:
        how = f", {self.choice}" if self.choice else ""
        rate = self.nbytes / max(self.seconds, 1e-9) / 1e9
        sound = "checked" if self.checked else "no checksums"
        what = f"{self.nbytes >> 20} MiB from {self.source} in {self.seconds:.2f} s"
        return f"{what}, {rate:.2f} GB/s, {sound}{how}"


def copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Flat, of equal length, source on the CPU; converts. In this thread alone."""
    if target.device.type != "cpu":
        target.copy_(source)
        return
    if source.dtype == target.dtype:
        # One call and no interpreter lock meanwhile: slices took twice the time of reading from the disk.
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
        return
    for at in range(0, len(source), SLICE):
        target[at : at + SLICE].copy_(source[at : at + SLICE])


def load(
    folder: Folder,
    tensors: Mapping[str, torch.Tensor],
    *,
    progress: Progress | None = None,
    way: Way | None = None,
    clock: Clock | None = None,
) -> Report:
    """Fill `tensors` (contiguous, of the shapes in the shards) with the folder's weights. Blocks.

    way: read in this one, and don't measure. Raises WeightsError; `tensors` then hold a part of the weights.
    """
    clock = clock or SystemClock()
    known = sums.read(folder.path)
    cut = plan(folder.facts, known.blocks, known.piece) if known else plan(folder.facts)
    dtypes = {fact.tensor: fact.dtype for fact in folder.facts}
    total = sum(fact.nbytes for fact in folder.facts)
    meter = Meter(folder.path.name, total, progress, clock)
    reader = Reader(folder.paths, way=way, clock=clock)
    flat = {name: tensor.view(-1) for name, tensor in tensors.items()}
    check = sums.Checker(folder, known)

    def put(span: Span, view: memoryview) -> None:
        for piece, part in sums.parts(span, view):
            check.piece(piece, part)
            dtype = dtypes[piece.tensor]
            source = torch.frombuffer(part, dtype=TORCH[dtype])
            first = piece.offset // ITEM_BYTES[dtype]
            copy(source, flat[piece.tensor][first : first + len(source)])

    for span, _ in reader.stream(spans(cut), put):
        meter.add(span.stop - span.start)
    report = Report("shards", total, meter.seconds, known is not None, reader.choice)
    log.info("%s: %s", folder.path, report)
    return report
