"""An engine without a model: exact, deterministic and fast, for tests of everything around an engine.

Each KV row is a hash of the row before it (as found in the cache), the token, the tensor and the position; each
next token is a function of all KV bytes the sequence was handed. So any wrong, missing or misplaced byte gives
other tokens. Everything else (queue, memory, prefix cache, sampling, text) is the code the real engine runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from farfill.clock import Clock
from farfill.core.layout import KVLayout, TensorKind, TensorLayout
from farfill.engine.executor import Capabilities, SequenceKV
from farfill.engine.limits import EngineLimits
from farfill.engine.local import LocalEngine
from farfill.engine.media import MediaInputs
from farfill.engine.memory import allocate_bytes
from farfill.engine.output import Vocabulary, byte_alphabet
from farfill.engine.protocol import EngineInfo

EOS_ID = 256
VOCAB_SIZE = 257
ROW_BYTES = 16

Step = Callable[[str], None]
"""Called on the engine thread with "prefill" or "decode" before each step; may block, or raise to make it fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeOptions:
    """Shape and bounds of a fake engine. `window_tokens` > 0 adds a layer with sliding windows, `states` one with a
    recurrent and a convolution state."""

    model: str = "fake"
    fingerprint: str = "fake-fingerprint"
    prefill_chunk_tokens: int = 16
    window_tokens: int = 0
    states: bool = False
    checkpoint_every_chunks: int = 0
    max_context_tokens: int = 4096
    max_batch: int = 8
    max_queue: int = 64
    kv_total_bytes: int = 1 << 24
    prefix_cache_bytes: int = 0
    step_token_budget: int = 512
    output_reserve_tokens: int | None = None
    prefix_ttl_s: float = 0.0


class FakeEngine(LocalEngine):
    """A `LocalEngine` over a `FakeExecutor`; `executor.step` may be replaced at any time."""

    def __init__(
        self, options: FakeOptions | None = None, step: Step | None = None, clock: Clock | None = None
    ) -> None:
        options = options or FakeOptions()
        layout = fake_layout(
            options.prefill_chunk_tokens,
            options.window_tokens,
            states=options.states,
            checkpoint_every_chunks=options.checkpoint_every_chunks,
        )
        self.executor = FakeExecutor(layout, step)
        info = EngineInfo(
            engine="fake",
            model=options.model,
            fingerprint=options.fingerprint,
            layout=self.executor.layout,
            max_context_tokens=options.max_context_tokens,
            vocab_size=VOCAB_SIZE,
            kv_total_bytes=options.kv_total_bytes,
        )
        limits = EngineLimits(
            max_batch=options.max_batch,
            max_queue=options.max_queue,
            prefix_cache_bytes=options.prefix_cache_bytes,
            step_token_budget=options.step_token_budget,
            output_reserve_tokens=options.output_reserve_tokens,
            prefix_ttl_s=options.prefix_ttl_s,
        )
        vocabulary = Vocabulary.of(byte_tokenizer(), frozenset({EOS_ID}), VOCAB_SIZE)
        super().__init__(info, self.executor, vocabulary, limits, clock)


class FakeKV:
    """Every tensor in one buffer; windows keep all rows, but may only be read where they should."""

    def __init__(self, layout: KVLayout, capacity_tokens: int) -> None:
        self.layout = layout
        self.capacity_tokens = capacity_tokens
        self.tokens = 0
        self.media: MediaInputs | None = None
        # Rows written so far, by layer: a prefill step completes one layer after the other.
        self.written: dict[int, int] = {}
        # States before the last token, to go back to when its step failed.
        self.states_before: tuple[int, list[bytes]] = (0, [])
        self.buffers = [
            allocate_bytes((capacity_tokens if t.kind.has_rows else 1) * t.row_bytes) for t in layout.tensors
        ]

    def place(self, tensor: int, start_token: int, end_token: int) -> memoryview:
        """The writable place of rows [start, end)."""
        row = self.layout.tensors[tensor].row_bytes
        if not self.layout.tensors[tensor].kind.has_rows:
            return self.buffers[tensor].data
        return self.buffers[tensor].data[start_token * row : end_token * row]

    def attach(self, tokens: int) -> None:
        """Declare the rows of the first `tokens` tokens present."""
        self.tokens = tokens

    def read(self, tensor: int, start_token: int, end_token: int) -> memoryview:
        """Read-only bytes of present rows."""
        layout = self.layout.tensors[tensor]
        present = max(self.tokens, self.written.get(layout.layer, 0) if layout.kind.grows else 0)
        assert end_token <= present, f"rows up to {end_token} wanted, {present} present"
        assert layout.kind.grows or end_token == present, f"kept at {present}, wanted as it was at {end_token}"
        return self.place(tensor, start_token, end_token).toreadonly()

    def fork(self) -> FakeKV:
        """An independent copy."""
        copy = FakeKV(self.layout, self.capacity_tokens)
        copy.tokens, copy.media = self.tokens, self.media
        for mine, other in zip(self.buffers, copy.buffers, strict=True):
            other[:] = mine
        return copy

    def truncate(self, tokens: int) -> None:
        """Forget the rows after the first `tokens` tokens."""
        at, states = self.states_before
        if states and at == tokens:
            for i, state in zip(self._states, states, strict=True):
                self.buffers[i].data[:] = state
        self.tokens = tokens
        self.written.clear()

    def append(self, token: int) -> None:
        """Add one token's rows."""
        self.states_before = self.tokens, [bytes(self.buffers[i].data) for i in self._states]
        for layer in self.layout_layers:
            self.write(layer, self.tokens, token)
        self.tokens += 1

    def write(self, layer: int, at: int, token: int) -> None:
        """Write the rows of token number `at` in one layer; they need those before it in tensor 0."""
        before = bytes(self.place(0, at - 1, at)) if at else b""
        for i, tensor in enumerate(self.layout.tensors):
            if tensor.layer == layer:
                person = f"{i}:{at}".encode()
                old = b"" if tensor.kind.has_rows or not at else bytes(self.buffers[i].data)
                row = blake2b(before + old + token.to_bytes(4, "little"), digest_size=tensor.row_bytes, person=person)
                self.place(i, at, at + 1)[:] = row.digest()

    @property
    def _states(self) -> list[int]:
        return [i for i, tensor in enumerate(self.layout.tensors) if not tensor.kind.has_rows]

    @property
    def layout_layers(self) -> list[int]:
        """The layers that keep anything, in order."""
        return sorted({tensor.layer for tensor in self.layout.tensors})

    def digest(self) -> int:
        """A number over all bytes attention may look at."""
        state = blake2b(digest_size=8)
        for i, tensor in enumerate(self.layout.tensors):
            first = 0 if tensor.kind.grows else max(0, self.tokens - tensor.window_tokens - 1)
            state.update(self.place(i, first, self.tokens))  # a state is there as a whole
        return int.from_bytes(state.digest(), "little")


class FakeExecutor:
    """Implements `engine.executor.Executor` with hashes."""

    def __init__(self, layout: KVLayout, step: Step | None = None) -> None:
        self.layout = layout
        self.capabilities = Capabilities()
        self.step: Step = step or (lambda phase: None)
        self.on_progress: Callable[[], None] = lambda: None

    def kv_bytes(self, capacity_tokens: int) -> int:
        """Memory of one sequence."""
        return sum((capacity_tokens if t.kind.has_rows else 1) * t.row_bytes for t in self.layout.tensors)

    def allocate(self, capacity_tokens: int, *, dense: bool = False) -> FakeKV:
        """An empty sequence."""
        return FakeKV(self.layout, capacity_tokens)

    def prefill(
        self, kv: SequenceKV, token_ids: Sequence[int], layer_done: Callable[[int], None] | None = None
    ) -> None:
        """Add the tokens' rows, layer by layer."""
        assert isinstance(kv, FakeKV)
        self.step("prefill")
        start = kv.tokens
        for layer in kv.layout_layers:
            for at, token in enumerate(token_ids, start):
                kv.write(layer, at, token)
            kv.written[layer] = start + len(token_ids)
            self.on_progress()
            if layer_done is not None:
                layer_done(layer)
        kv.tokens = start + len(token_ids)

    def decode(self, rows: Sequence[tuple[SequenceKV, int]]) -> npt.NDArray[np.float32]:
        """Add one token each; logits that favour printable characters and rarely end."""
        self.step("decode")
        logits = np.empty((len(rows), VOCAB_SIZE), np.float32)
        for i, (kv, token) in enumerate(rows):
            assert isinstance(kv, FakeKV)
            kv.append(token)
            logits[i] = np.random.Generator(np.random.PCG64(kv.digest())).random(VOCAB_SIZE, np.float32)
        logits[:, 32:127] += 1.0
        return logits

    def idle(self) -> None:
        """Nothing is kept for speed."""


def fake_layout(
    prefill_chunk_tokens: int, window_tokens: int = 0, *, states: bool = False, checkpoint_every_chunks: int = 0
) -> KVLayout:
    """Two layers of full attention, with `window_tokens` one of sliding windows, with `states` one of states."""
    kinds = [(TensorKind.FULL, TensorKind.FULL), (TensorKind.FULL, TensorKind.FULL)]
    if window_tokens:
        kinds.append((TensorKind.WINDOW, TensorKind.WINDOW))
    if states:
        kinds.append((TensorKind.RECURRENT, TensorKind.CONV))
    tensors = tuple(
        TensorLayout(layer, name, kind, "uint8", (ROW_BYTES,), window_tokens if kind is TensorKind.WINDOW else 0)
        for layer, pair in enumerate(kinds)
        for name, kind in zip(("k", "v"), pair, strict=True)
    )
    return KVLayout(tensors, prefill_chunk_tokens, checkpoint_every_chunks)


def byte_tokenizer() -> Tokenizer:
    """A tokenizer whose token ids are bytes, and `EOS_ID`."""
    tokenizer = Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
