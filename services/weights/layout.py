"""Where every tensor lies in the one piece of memory that holds a model's weights in the run dtype.

Law: pure; knows names and sizes of dtypes, not torch. The same facts give the same layout, in every process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from regions.cli.errors import UsageError
from services.weights.plan import ITEM_BYTES, Fact

ALIGN = 64
"""Every tensor begins at a multiple of this: a cache line, the widest vector register."""
VERSION = 1
"""Part of the name of parked files: raise it when the layout changes."""
RUN_DTYPES: Mapping[str, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True)
class Place:
    """One tensor. dtype: as it runs; offset: in bytes from the start."""

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Layout:
    """All of them. size: bytes of memory, gaps included; nbytes: of the tensors alone."""

    places: Mapping[str, Place]
    size: int
    nbytes: int


def run_dtype(name: str) -> str:
    """safetensors' name of a dtype that weights may run in. Raises UsageError."""
    if name not in RUN_DTYPES:
        raise UsageError(f"dtype {name!r}", "weights don't run in it", f"known: {', '.join(RUN_DTYPES)}")
    return RUN_DTYPES[name]


def layout(facts: Iterable[Fact], dtype: str) -> Layout:
    """Floats become `dtype` ("F32", ...), whole numbers stay what they are."""
    places, at = {}, 0
    for fact in sorted(facts, key=lambda f: (f.shard, f.start, f.tensor)):
        kind = dtype if fact.dtype in _FLOATS else fact.dtype
        place = places[fact.tensor] = Place(fact.tensor, kind, fact.shape, at)
        at = -(-(at + place.nbytes) // ALIGN) * ALIGN
    return Layout(places, at, sum(place.nbytes for place in places.values()))
