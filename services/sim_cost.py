"""What the simulated engine costs, holds and says: options, prices, tokens.

Law: pure; no clock, no asyncio. A price is a function of (options, batch, prefill tokens, age of the engine);
a token is a function of (prompt or ids, seed, sample, index) and of nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from regions.cli.errors import UsageError
from services.engine import GenerateRequest

_WORDS = (
    "river water weir stream flow gate basin canal delta spring source mouth bank reed stone bridge "
    "mill lock tide pool ford brook dam sluice eddy rapid marsh pond lake sea rain mist"
)
VOCABULARY = tuple(_WORDS.split())
CHARS_PER_TOKEN = 4
"""How a prompt given as text is counted: this engine has no tokenizer."""
_MASK = (1 << 64) - 1
_FOREVER_S = 1e12


def _option(default: float, low: float, high: float) -> float:
    made: float = field(default=default, metadata={"low": low, "high": high})
    return made


def _whole(default: int, low: int, high: int) -> int:
    made: int = field(default=default, metadata={"low": low, "high": high})
    return made


@dataclass(frozen=True, slots=True)
class SimOptions:
    """Prices in milliseconds, sizes in tokens or bytes; -1: never.

    A step costs (step_ms + seq_ms * sequences + prefill_ms_per_token * prompt tokens that join) / speed
    and gives each running sequence one token. slots: sequences at once. kv_tokens, kv_block: the cache; a
    sequence reserves the blocks of prompt and max_tokens when it joins. continuous 0: sequences join only
    an empty engine. eos_mean: mean length of an answer that ends by itself, 0: none does.

    Faults on order. fail_rate: share of requests that fail before their first token, chosen by fault_seed
    and the number of the request; fail_first: so many first requests fail. hang_after, nan_after, die_after:
    index of the token where a sequence stops for ever, has BadLogits, or kills the engine. oom_at_step,
    lost_at_step: number of the step (from 0) that runs out of memory, or loses the device. From slow_from_s
    to slow_to_s after the start, steps of at least slow_batch sequences cost slow_factor times as much.
    wake_fails, wake_garbage: so many first wakes fail, or leave an engine that says other tokens.
    leak_bytes: what each sleep leaves on the device.
    """

    prefill_ms_per_token: float = _option(0.02, 0, 1e6)
    step_ms: float = _option(5.0, 0, 1e6)
    seq_ms: float = _option(0.05, 0, 1e6)
    speed: float = _option(1.0, 1e-6, 1e6)
    slots: int = _whole(256, 1, 10**6)
    kv_tokens: int = _whole(131_072, 1, 10**12)
    kv_block: int = _whole(16, 1, 10**6)
    context: int = _whole(8192, 2, 10**9)
    continuous: int = _whole(1, 0, 1)
    eos_mean: int = _whole(0, 0, 10**9)
    start_ms: float = _option(0.0, 0, 1e9)
    sleep_ms: float = _option(0.0, 0, 1e9)
    wake_ms: float = _option(0.0, 0, 1e9)
    weights_bytes: int = _whole(0, 0, 10**15)
    kv_bytes_per_token: int = _whole(0, 0, 10**9)
    fail_rate: float = _option(0.0, 0, 1)
    fault_seed: int = _whole(0, 0, 2**63)
    fail_first: int = _whole(0, 0, 10**9)
    hang_after: int = _whole(-1, -1, 10**9)
    nan_after: int = _whole(-1, -1, 10**9)
    die_after: int = _whole(-1, -1, 10**9)
    oom_at_step: int = _whole(-1, -1, 10**9)
    lost_at_step: int = _whole(-1, -1, 10**9)
    slow_from_s: float = _option(-1.0, -1, _FOREVER_S)
    slow_to_s: float = _option(_FOREVER_S, 0, _FOREVER_S)
    slow_factor: float = _option(3.0, 1e-6, 1e6)
    slow_batch: int = _whole(0, 0, 10**6)
    wake_fails: int = _whole(0, 0, 10**6)
    wake_garbage: int = _whole(0, 0, 10**6)
    leak_bytes: int = _whole(0, 0, 10**15)


def parse(options: Mapping[str, str]) -> SimOptions:
    """Options from text. Raises UsageError naming the option."""
    known = {f.name: f for f in fields(SimOptions)}
    values: dict[str, float | int] = {}
    for name, text in options.items():
        if name not in known:
            raise UsageError(
                f"engine option {name!r}", "unknown to sim", f"known: {', '.join(sorted(known))}"
            )
        kind, bounds = known[name].type, known[name].metadata
        try:
            values[name] = int(text) if kind == "int" else float(text)
        except ValueError:
            raise UsageError(f"engine option {name}={text!r}", f"not a number ({kind})") from None
        if not bounds["low"] <= values[name] <= bounds["high"]:
            span = f"from {bounds['low']:g} to {bounds['high']:g}"
            raise UsageError(f"engine option {name}={text!r}", "out of range", span)
    return SimOptions(**values)  # type: ignore[arg-type]


def prompt_tokens(request: GenerateRequest) -> int:
    """Ids count as they are; of text, one token for every four characters, at least one."""
    return len(request.prompt_ids) or max(1, -(-len(request.prompt) // CHARS_PER_TOKEN))


def blocks(tokens: int, block: int) -> int:
    return -(-tokens // block)


def step_s(options: SimOptions, batch: int, prefill: int, age_s: float) -> float:
    """Seconds of one step with `batch` running sequences, of which `prefill` prompt tokens are new."""
    o = options
    ms = o.step_ms + o.seq_ms * batch + o.prefill_ms_per_token * prefill
    if o.slow_from_s >= 0 and o.slow_from_s <= age_s < o.slow_to_s and batch >= o.slow_batch:
        ms *= o.slow_factor
    return ms / 1000 / o.speed


def limit_tokens_s(options: SimOptions) -> float:
    """Tokens a second with all slots decoding and nothing to prefill: what no schedule can exceed."""
    return options.slots / step_s(options, options.slots, 0, 0.0)


def fails(options: SimOptions, number: int) -> bool:
    """Whether request `number` (from 1) is one of those that fail on order."""
    if number <= options.fail_first:
        return True
    if not options.fail_rate:
        return False
    digest = hashlib.blake2b(b"%d\0%d" % (options.fault_seed, number), digest_size=8).digest()
    return int.from_bytes(digest, "big") < options.fail_rate * 2**64


class Words:
    """The endless token sequence of one request. The prompt is hashed once, a token costs no hash."""

    def __init__(self, request: GenerateRequest, salt: int = 0) -> None:
        what: object = request.prompt_ids or request.prompt
        text = f"{salt}\0{request.seed}\0{request.sample}\0{what}"
        digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
        self._base = int.from_bytes(digest, "big")

    def _draw(self, index: int) -> int:
        # One round of splitmix64: spreads neighbouring indices over the whole range.
        z = (self._base + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        return z ^ (z >> 31)

    def at(self, index: int) -> tuple[int, str]:
        """Token id and text of one step."""
        number = self._draw(index) % len(VOCABULARY)
        return number, (" " if index else "") + VOCABULARY[number]

    def ends(self, index: int, mean: int) -> bool:
        """Whether the answer ends by itself with this token: geometric with this mean."""
        return mean > 0 and (self._draw(index) >> 8) * mean < 1 << 56
