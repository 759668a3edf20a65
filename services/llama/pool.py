"""The paged KV pool: one tensor for all layers.

Law: owns the memory of K and V; which block is whose is for blocks.py. Layout (layers, blocks, block, 2,
kv_heads, head_dim): a token's K and V lie side by side, so that one index finds both, and a gathered block
row is whole cache lines.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.kv.shape import KvShape
from services.llama.config import LlamaConfig
from services.weights.arena import HostArena

_STORED_AS = {1: torch.uint8}
"""fp8 is moved as bytes: gather and scatter don't know the type."""


def shape_of(config: LlamaConfig, dtype: torch.dtype, block: int) -> KvShape:
    """The accounting's view of this pool (services/kv): bytes are those of `KvPool.nbytes`, exactly."""
    return KvShape(
        config.layers,
        config.kv_heads,
        config.head_dim,
        dtype=str(dtype).removeprefix("torch."),
        block=block,
        windows=(config.window,) * config.layers if config.window else (),
        heads=config.heads,
        context=config.context,
    )


class KvPool:
    """`blocks` blocks of `block` tokens. dtype: as stored; compute dtype is the caller's. generation: grows
    whenever the memory was taken anew (on a GPU it lies elsewhere then)."""

    def __init__(
        self, config: LlamaConfig, blocks: int, block: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block, self.blocks, self.dtype, self.device = block, blocks, dtype, device
        self._row = config.kv_row
        self._shape = (config.layers, blocks, block, 2, config.kv_heads, config.head_dim)
        self._store = _STORED_AS.get(dtype.itemsize, dtype)
        self.nbytes = config.layers * blocks * block * config.kv_row * dtype.itemsize
        self._arena = HostArena(self.nbytes) if device.type == "cpu" else None
        self.generation = 0
        self._whole: Tensor | None = None
        self.layers: tuple[Tensor, ...] = ()
        self.rows: tuple[Tensor, ...] = ()
        self.take()

    def take(self) -> None:
        """Have the memory (again): zeros. On the CPU it costs nothing until written."""
        if self._arena is not None:
            whole = self._arena.tensor(self._store, self._shape, 0)
        else:
            whole = torch.zeros(self._shape, dtype=self._store, device=self.device)
        self._whole = whole
        self.generation += 1
        # Per layer, two views of the same memory: by block for gathering, by token for writing.
        self.layers = tuple(layer.view(self.blocks, -1) for layer in whole)
        self.rows = tuple(layer.view(self.blocks * self.block, self._row) for layer in whole)

    def give_back(self) -> None:
        """All of the memory, to the system or the device. Nothing may read the pool until `take`."""
        self._whole, self.layers, self.rows = None, (), ()
        if self._arena is not None:
            self._arena.release()
        else:
            # torch keeps freed memory for itself otherwise.
            torch.cuda.empty_cache()

    def close(self) -> None:
        self.give_back()
        if self._arena is not None:
            self._arena.close()

    @property
    def held_bytes(self) -> int:
        return self.nbytes if self._whole is not None else 0

    def wipe(self, blocks: list[int]) -> None:
        """Zeros: a NaN left behind would spoil the next owner, whom a mask doesn't save from NaN."""
        if self._whole is not None and blocks:
            self._whole[:, torch.tensor(blocks, device=self.device)] = 0

    def write(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        """kv (T, 2, kv_heads, d) in any dtype to the flat places `slots` (T,) = block id · block + offset."""
        self.rows[layer].index_copy_(0, slots, kv.reshape(-1, self._row).to(self.dtype).view(self._store))

    def gather(self, layer: int, blocks: Tensor, out: Tensor) -> Tensor:
        """Blocks (N,) copied to out (N, block · row), as the stored dtype; the same memory as `out`."""
        torch.index_select(self.layers[layer], 0, blocks, out=out)
        return out

    def buffer(self, blocks: int) -> Tensor:
        """Room for `gather` of so many blocks."""
        return torch.empty((blocks, self.block * self._row), dtype=self._store, device=self.device)

    def read(self, gathered: Tensor, sequences: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """K and V (sequences, kv_heads, tokens, d) of what was gathered; views unless the dtype differs."""
        _, _, _, _, heads, dim = self._shape
        kv = gathered.view(self.dtype).view(sequences, -1, 2, heads, dim)
        kv = kv if kv.dtype == dtype else kv.to(dtype)
        return kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)
