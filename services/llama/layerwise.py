"""The fallback mode (S14): no KV cache; every token is computed from the whole sequence, layer by layer.

Law: memory of one layer's activations over one sequence, however many layers there are, and no pool; the same
tokens as the cached mode, at the price of a prefill for each. Shares the weights of a TorchEngine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from services.engine import EngineFacts, EngineStats
from services.faults import BadLogits, EngineFault, OutOfDeviceMemory, WakeFailed
from services.llama.core import Outcome, is_out_of_memory
from services.llama.decoder import Decoder
from services.llama.engine import TorchEngine
from services.llama.flash import choose as choose_attention
from services.llama.lifecycle import LlamaEngine
from services.llama.sampling import choose
from services.llama.sequence import Sequence
from services.llama.witness import fixed_ids, otherwise, told


class LayerwiseCore:
    """See core.Core. One sequence after the other: two at once would need the activations of both."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.queue: deque[Sequence] = deque()

    def add(self, sequence: Sequence) -> None:
        self.queue.append(sequence)

    def reap(self) -> None:
        for sequence in [s for s in self.queue if s.cancelled]:
            self.queue.remove(sequence)

    def busy(self) -> bool:
        return bool(self.queue)

    def everyone(self) -> Iterable[Sequence]:
        return tuple(self.queue)

    def step(self) -> list[Outcome]:
        sequence = self.queue[0]
        try:
            token, good = self.next_token(sequence)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return [self._lose(OutOfDeviceMemory(f"a step ran out of memory: {error}"))]
        if not good:
            return [self._lose(BadLogits("the model gave NaN or infinite logits"))]
        finish = sequence.push(token)
        if finish:
            self.queue.popleft()
        return [Outcome(sequence, token, finish)]

    @torch.inference_mode()
    def next_token(self, sequence: Sequence) -> tuple[int, bool]:
        """The token behind what the sequence has, and whether its logits were finite."""
        tokens, good = choose(self.logits(sequence.tokens), [sequence.sampling], [sequence.made])
        return tokens[0], good[0]

    @torch.inference_mode()
    def logits(self, tokens: Seq[int]) -> Tensor:
        """(1, vocabulary): behind the last of these ids."""
        decoder = self.decoder
        ids = torch.tensor(tokens, dtype=torch.int64, device=decoder.device)
        run = decoder.enter(ids, torch.arange(len(ids), device=decoder.device))
        for layer in decoder.layers:
            decoder.whole_layer(layer, run)
        return decoder.head_of(run.x[-1:])

    def _lose(self, error: EngineFault) -> Outcome:
        return Outcome(self.queue.popleft(), error=error)


class LayerwiseEngine(LlamaEngine):
    """An engine of its own on the model of `engine`, which needn't be started."""

    name = "torch-layerwise"

    def __init__(self, engine: TorchEngine) -> None:
        super().__init__(engine.model)
        self._core: LayerwiseCore | None = None
        self._expected: Tensor | None = None

    def _describe(self) -> EngineFacts:
        return EngineFacts(
            self.name,
            self.model.name,
            context=self.model.context,
            sequences=1,
            continuous=False,
            sleep_levels=(1, 2),
            weights_bytes=self.model.weights.nbytes if self._core else 0,
            device=str(self.model.device),
            wake_proves=True,
        )

    def stats(self) -> EngineStats:
        core, serving = self._core, self._serving
        if core is None or serving is None:
            return EngineStats()
        waiting = len(core.queue)
        return EngineStats(
            running=min(1, waiting),
            waiting=max(0, waiting - 1),
            tokens=serving.tokens,
            prompt_tokens=serving.prompt_tokens,
            dead=serving.dead,
            memory_bytes=self.model.weights_bytes,
        )

    def _build(self) -> LayerwiseCore:
        model, config = self.model, self.model.config
        attention = choose_attention(model.settings.attention, model.device, model.dtype, config.window)
        self._core = LayerwiseCore(Decoder(config, model.weights.tensors, attention))
        self._expected = self._answer()
        return self._core

    def _answer(self) -> Tensor:
        """Logits behind a fixed prompt."""
        assert self._core is not None
        return told(self._core.logits(fixed_ids(8, self.model.config.vocabulary)))

    def _room(self) -> int:
        return self.model.context

    def _needs(self) -> int:
        return 0

    def _give_back(self) -> None:
        """It has nothing."""

    def _take_back(self, level: int) -> None:
        if not level:
            # The other engine on these weights woke first, and looked.
            return
        assert self._expected is not None
        if wrong := otherwise(self._expected, self._answer(), self.model.dtype):
            raise WakeFailed(wrong)

    def _end(self) -> None:
        self._core = None
