"""Bytes of the KV cache: exact, from a model's config.json.

Law: pure arithmetic on whole numbers; reads no file. The bytes are those that the torch engine's paged pool
allocates (tests/contract/test_kv_pool_bytes.py), so a change of one is a change of both.

One token costs, in one layer, a key and a value of `kv_heads` vectors of `head_dim` elements:

    2 * kv_heads * head_dim * bytes_per_element

so a sequence of L tokens costs 2 * L * h_kv * d_head * bytes per layer: linear in L and in d. The text that
S12 started from says O(L * d^2) and 16 GB per layer at L = 131072, d = 512, fp16. Right for that case is
2 * 131072 * 512 * 2 = 268,435,456 bytes = 0.25 GiB per layer: a 64th of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

DEFAULT_BLOCK = 16
"""Tokens per block of the paged cache."""

DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""Bytes of one element, by torch's own name of the type."""

DTYPE_NAMES = {
    "fp32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""What people write → torch's name. Scales of fp8 are a few bytes per layer, outside of the pool."""


def dtype_name(text: str) -> str:
    """torch's name of a KV type. Raises ValueError that lists what is known."""
    plain = text.strip().lower().removeprefix("torch.")
    name = DTYPE_NAMES.get(plain, plain)
    if name not in DTYPE_BYTES:
        raise ValueError(f"{text!r} is no KV type; known: {', '.join([*DTYPE_NAMES, *DTYPE_BYTES])}")
    return name


def ceil_div(number: int, by: int) -> int:
    return -(-number // by)


def round_up(number: int, to: int) -> int:
    return ceil_div(number, to) * to


def kept_tokens(tokens: int, window: int = 0) -> int:
    """Tokens whose keys and values a layer still needs: all, or the last `window` (0: no window)."""
    return min(tokens, window) if window else tokens


def blocks_for(tokens: int, block: int, window: int = 0, chunk: int = 1) -> int:
    """Most blocks that a sequence of `tokens` ever holds at once.

    window: tokens that a query looks back at, itself included; 0: all. chunk: tokens computed in one step of
    prefill. Blocks wholly behind the window of a step's first token are given back before it, but the edge
    may lie anywhere inside a block: `window - 1 + chunk` tokens touch up to
    ceil((window + chunk - 2) / block) + 1 of them.
    """
    if tokens < 0 or block < 1 or window < 0 or chunk < 1:
        raise ValueError(f"tokens {tokens}, block {block}, window {window}, chunk {chunk}: not sizes")
    whole = ceil_div(tokens, block)
    return min(whole, ceil_div(window + chunk - 2, block) + 1) if window else whole


@dataclass(frozen=True, slots=True)
class KvShape:
    """What decides the size of one model's KV cache.

    kv_heads, heads: of keys and values, and of queries (equal: MHA; 1 kv head: MQA; between: GQA). dtype:
    torch's name. block: tokens per block. alignment: bytes to which the vector of one head is padded
    (1: not at all, which is what the torch engine does). windows: of each layer, 0 where it keeps all;
    empty: every layer keeps all. context: the model's own limit in tokens, 0: not known. chunk: prompt tokens
    that the engine computes in one step; with a window, what a step writes comes on top of it.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    block: int = DEFAULT_BLOCK
    alignment: int = 1
    windows: tuple[int, ...] = ()
    heads: int = 0
    context: int = 0
    chunk: int = 1

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "block", "alignment", "chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: must be at least 1")
        if self.windows and len(self.windows) != self.layers:
            raise ValueError(f"{len(self.windows)} windows for {self.layers} layers")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {self.dtype!r}: not one of {', '.join(DTYPE_BYTES)}")

    @property
    def kind(self) -> str:
        """MHA, GQA or MQA; "" when the number of query heads is not known."""
        if not self.heads:
            return ""
        return "MQA" if self.kv_heads == 1 else "MHA" if self.kv_heads == self.heads else "GQA"

    @property
    def bytes_per_element(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_token_layer(self) -> int:
        """Key and value of one token in one layer."""
        return 2 * self.kv_heads * round_up(self.head_dim * self.bytes_per_element, self.alignment)

    @property
    def bytes_per_token(self) -> int:
        """Key and value of one token in all layers."""
        return self.layers * self.bytes_per_token_layer

    @property
    def bytes_per_block(self) -> int:
        """One block in all layers: the unit that the pool hands out."""
        return self.block * self.bytes_per_token

    @property
    def pool_window(self) -> int:
        """Window of the paged pool: one table of blocks serves all layers, so the longest look back counts,
        and a single layer that keeps all keeps it for all of them (0)."""
        return 0 if not self.windows or 0 in self.windows else max(self.windows)

    def blocks(self, tokens: int) -> int:
        """Blocks of the pool that a sequence of `tokens` holds."""
        return blocks_for(tokens, self.block, self.pool_window, self.chunk)

    def sequence_bytes(self, tokens: int) -> int:
        """What a sequence of `tokens` holds in the pool: whole blocks, in all layers."""
        return self.blocks(tokens) * self.bytes_per_block

    def layer_bytes(self, tokens: int, layer: int) -> int:
        """What one layer alone needs for a sequence: whole blocks, its own window."""
        window = self.windows[layer] if self.windows else 0
        return blocks_for(tokens, self.block, window, self.chunk) * self.block * self.bytes_per_token_layer

    def per_layer_bytes(self, tokens: int) -> int:
        """What a cache with a table of blocks per layer would need: the sum over the layers' own windows.
        Less than `sequence_bytes` where only some layers have a window."""
        if not self.windows:
            return self.layers * self.layer_bytes(tokens, 0)
        per_window = {w: blocks_for(tokens, self.block, w, self.chunk) for w in set(self.windows)}
        return sum(per_window[w] for w in self.windows) * self.block * self.bytes_per_token_layer

    def pool_bytes(self, blocks: int) -> int:
        """What a pool of this many blocks allocates."""
        if blocks < 0:
            raise ValueError(f"{blocks} blocks")
        return blocks * self.bytes_per_block

    def pool_blocks(self, memory: int) -> int:
        """Whole blocks that go into `memory` bytes."""
        return max(0, memory) // self.bytes_per_block

    def memory_ratio(self, tokens: int) -> float:
        """Kept tokens over all tokens in the pool: 1.0 when all are kept, W / L with a window W of L."""
        return kept_tokens(tokens, self.pool_window) / tokens if tokens else 1.0

    def with_window(self, window: int) -> KvShape:
        """The same model with this window in every layer (S12's second strategy), 0: keep all."""
        if window < 0:
            raise ValueError(f"window {window}: must be 0 (keep all) or more")
        return replace(self, windows=(window,) * self.layers if window else ())
