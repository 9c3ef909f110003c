"""What every engine offers. Workers know this file only; `torch`, `vllm` and `fake` implement it.

Threading contract: all methods may be called from any thread and return at once; sinks are called on the
engine's own thread and must not block. A prompt of N tokens is prefilled in chunks whose boundaries are
multiples of `layout.prefill_chunk_tokens` counted from the prompt's start, over tokens 0..N-2; the last
prompt token is computed by the decode step that also samples. Who prefills never changes a result.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from farfill.core.layout import KVLayout
from farfill.core.sampling import SamplingParams
from farfill.engine.blocks import BlockLedger
from farfill.engine.media import MediaInputs, MediaProcessor
from farfill.kv.hashing import KeyMaterial
from farfill.kv.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What a worker announces about its engine. `fingerprint` covers weights, config, tokenizer, chat
    template, cache dtype and layout: equal fingerprints mean exchangeable KV."""

    engine: str
    model: str
    fingerprint: str
    layout: KVLayout
    max_context_tokens: int
    vocab_size: int
    kv_total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTotals:
    """What happened since the start. `hit_tokens` were not computed thanks to the prefix cache, `miss_tokens` were.

    `set_back_*`: sequences whose KV was taken away to be computed again, for the growth of others or for a request
    of higher priority. `prefix_dropped_*`: snapshots dropped for room, or because nobody used them in time.
    `prefix_pins_refused`: snapshots that were to be pinned and are not, because pins have a bound. `loads_*`: prompts
    whose KV was there and was not used, because it was not as described, or because copying it broke.
    """

    decode_steps: int = 0
    prefill_chunks: int = 0
    prefix_hits: int = 0
    prefix_misses: int = 0
    hit_tokens: int = 0
    miss_tokens: int = 0
    set_back_growth: int = 0
    set_back_priority: int = 0
    prefix_dropped_room: int = 0
    prefix_dropped_age: int = 0
    prefix_pins_refused: int = 0
    loads_refused: int = 0
    loads_broken: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoads:
    """Of an engine in several processes: what each rank did since the start, rank 0 first.

    `step_s` in steps, of which `exchange_s` in exchanges with the others, waiting for them included.
    `expert_tokens`: (token, layer) pairs sent to each expert.
    """

    step_s: tuple[float, ...]
    exchange_s: tuple[float, ...]
    expert_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """A snapshot of how busy the engine is. Of `kv_used_bytes`, `kv_filled_bytes` hold KV of tokens by now.

    Not `ready`: it lives but does not answer at the moment. `exposition`: what it measured itself, as Prometheus' text.
    """

    queued_tokens: int
    running_sequences: int
    waiting_sequences: int
    kv_used_bytes: int
    prefix_cache_bytes: int
    prefix_pinned_bytes: int = 0
    kv_filled_bytes: int = 0
    kv_most_bytes: int = 0
    totals: EngineTotals = EngineTotals()
    ready: bool = True
    exposition: bytes = b""
    ranks: RankLoads | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """One token's natural-log probability under the model (before temperature), with its raw bytes."""

    token_id: int
    logprob: float
    text_bytes: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """New output of choice `index`. `finish_reason` ("stop" | "length") is set on its last event.

    `text` never ends in half a character; with a stop string it may lag behind `token_ids`. `stop_reason`
    is the stop string or stop token id that ended it, None for EOS or length. `logprobs`, when asked for,
    has one (chosen, alternatives) pair per token id.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[tuple[Logprob, tuple[Logprob, ...]], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillStats:
    """How a prompt was prefilled here. `computed_tokens` excludes what a prefix hit or a slot supplied.

    `kv_problem`: why nothing was used of the KV that the slot had; empty when it was.
    """

    queued_s: float
    compute_s: float
    computed_tokens: int
    cached_tokens: int
    kv_problem: str = ""


class Cancellable(Protocol):
    """Work in the engine that may be withdrawn; `cancel` is idempotent and takes effect within one step.

    The sink then gets `failed(CancelledWorkError)` unless it already got its last call.
    """

    def cancel(self) -> None: ...


class PrefillSink(Protocol):
    """Hears of one prefill. Called on the engine thread; never blocks."""

    def progress(self) -> None:
        """The engine is alive: it finished a step, maybe another request's."""
        ...

    def pieces_ready(self, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """Piece index and its bytes (read-only, contiguous, stable until the held export is released).

        Rows of growing tensors come layer by layer while their prefill chunk is computed, the rest at its end.
        """
        ...

    def finished(self, stats: PrefillStats) -> None: ...

    def failed(self, error: Exception) -> None: ...


class PrefillHandle(Cancellable, Protocol):
    """A prefill whose KV is being exported. The KV stays allocated until `release` (idempotent)."""

    @property
    def manifest(self) -> Manifest: ...

    def release(self) -> None: ...


class TokenSink(Protocol):
    """Hears of one generation. Called on the engine thread; never blocks."""

    def prefilled(self, stats: PrefillStats) -> None:
        """The prompt's KV is complete; the next step samples the first token."""
        ...

    def token(self, event: TokenEvent) -> None: ...

    def failed(self, error: Exception) -> None: ...


class KVSlot(Protocol):
    """KV memory of one future sequence, to be filled from outside, then handed to `Engine.generate`.

    `held` are pieces that need not arrive (a local prefix hit). `buffer(i)` is the writable place of piece
    i; writing after `release` or after `generate` took the slot is the caller's bug: fence writers first.
    """

    @property
    def manifest(self) -> Manifest: ...

    @property
    def held(self) -> frozenset[int]: ...

    def buffer(self, piece: int) -> memoryview: ...

    def release(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPrefix:
    """An order for a prompt's beginning: how many of its tokens it is for (whole prefill chunks), and how many of these
    the prefix cache has now."""

    tokens: int
    there_tokens: int


@runtime_checkable
class KeepsPrefixes(Protocol):
    """An `Engine` that can be told which prefixes to keep. Any thread."""

    def keep_prefix(
        self, tokens: Sequence[int], cache_salt: str, *, pinned: bool, weight: float, ttl_s: float
    ) -> KeptPrefix:
        """Keep snapshots of prompts that begin with `tokens`, those to come as well, for `ttl_s` (0: always): pinned,
        or as if they were `weight` times as costly to compute. Weight 1 and no pin takes an earlier order back.

        Pins take up to half of the prefix cache. 0 tokens: it is off, or `tokens` are fewer than a prefill chunk.
        """
        ...


@runtime_checkable
class KeepsCheckpoints(Protocol):
    """A `KVSlot` that can make use of windows and states as they were before the prompt's end, for prefix hits."""

    def received(self, pieces: Collection[int]) -> None:
        """These pieces are complete; to be told before `generate`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillWork:
    """Compute the KV of `prompt[:-1]` and export it. `cache_salt` separates tenants in the prefix cache.

    `priority`: lower goes first, within `core.priority`'s bounds. Among equals, tenants take turns.
    `adapter` and `media` (position and digest of what stands behind tokens that are no text) are part of prefix keys;
    `media_inputs` is what the model sees there.
    """

    request_id: str
    prompt: tuple[int, ...]
    cache_salt: str
    priority: int = 0
    tenant: str = ""
    adapter: str = ""
    media: tuple[KeyMaterial, ...] = ()
    media_inputs: MediaInputs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateWork:
    """Generate from `prompt` under `sampling` (n choices share one prefill). The rest as in `PrefillWork`."""

    request_id: str
    prompt: tuple[int, ...]
    cache_salt: str
    sampling: SamplingParams
    priority: int = 0
    tenant: str = ""
    adapter: str = ""
    media: tuple[KeyMaterial, ...] = ()
    media_inputs: MediaInputs | None = None


class Engine(Protocol):
    """A model executor with one scheduler thread."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def media(self) -> MediaProcessor | None:
        """The image side of the model; None when it takes text only."""
        ...

    @property
    def blocks(self) -> BlockLedger | None:
        """What the prefix cache holds, and how that changes; None: the engine does not tell."""
        ...

    def load(self) -> EngineLoad:
        """Raises EngineError when it can never work again: its process should end, to be started anew."""
        ...

    def start(self) -> None:
        """Start the scheduler thread. The model is already loaded."""
        ...

    def close(self) -> None:
        """Fail all work with CancelledWorkError and join the thread. Idempotent."""
        ...

    def prefill(self, work: PrefillWork, sink: PrefillSink) -> PrefillHandle:
        """Queue a prefill. Raises CapacityError when the queue or KV memory cannot take it."""
        ...

    def reserve(self, work: GenerateWork) -> KVSlot:
        """Allocate KV for the prompt and the output to come. Raises CapacityError (reason kv_memory)."""
        ...

    def prepare(self, sampling: SamplingParams) -> Future[None]:
        """Begin what `generate` needs besides the KV (a compiled grammar); to be waited for before `generate`.

        The future raises InvalidRequestError; cancelling it has no effect.
        """
        ...

    def generate(
        self, work: GenerateWork, sink: TokenSink, *, slot: KVSlot | None = None, valid_tokens: int = 0
    ) -> Cancellable:
        """Queue a generation. With `slot`, the first `valid_tokens` prompt tokens' KV is already there
        (what `manifest.complete_prefix_tokens` says of the pieces) and the engine owns the slot from now on."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError if, while idle, any KV memory is held without an owner."""
        ...
