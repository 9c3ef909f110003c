"""Control messages between gateway, workers and registry: msgpack bodies over mutual-TLS HTTP.

Requests and single answers are msgpack; a generation answers as a stream of frames, each a
4-byte big-endian length and one msgpack message (see `wire.events`). Unknown fields are ignored, so peers may differ by
a minor version; `PROTOCOL_VERSION` differs when they may not.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

PROTOCOL_VERSION = 1
VERSION_HEADER = "x-farfill-protocol"
CONTENT_TYPE = "application/msgpack"
MAX_TEXT_BYTES = 4096
"""Of a prompt that comes as text: both sides tokenize it on their event loops, in a millisecond or two."""


class SamplingMessage(msgspec.Struct, omit_defaults=True, kw_only=True):
    """`core.sampling.SamplingParams` on the wire."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    n: int = 1
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    bad_words: list[tuple[int, ...]] = []
    allowed_token_ids: list[int] = []
    grammar: str = ""


class MediaMessage(msgspec.Struct, array_like=True):
    """An image of a prompt: its placeholders lie in tokens [start_token, end_token); `data` is the file as it came."""

    start_token: int
    end_token: int
    data: bytes


class RenderCommand(msgspec.Struct, kw_only=True):
    """POST /v1/render on any worker: `text` has one placeholder an image, where its tokens are to go.

    400 (unsupported_media) when the worker's model or engine takes no images.
    """

    text: str
    images: list[bytes]
    add_special_tokens: bool = False


class RenderReply(msgspec.Struct, kw_only=True):
    """The prompt's token ids; for each image the tokens [start, end) its placeholders lie in; and what its images add
    to the index of a later token to get its position."""

    token_ids: list[int]
    spans: list[tuple[int, int]]
    position_offset: int = 0


class PrefillCommand(msgspec.Struct, kw_only=True):
    """POST /v1/prefill on a prefill worker: compute `token_ids[:-1]`, push the KV to `target`.

    The answer comes when the transfer ended: `PrefillReport`, or `ErrorBody` with a non-200 status.
    `priority`: lower goes first; among equals, tenants take turns.
    """

    request_id: str
    ticket: str
    target: str
    token_ids: list[int]
    cache_salt: str = ""
    tenant: str = ""
    priority: int = 0
    timeout_s: float
    traceparent: str = ""
    media: list[MediaMessage] = []
    position_offset: int = 0


class ChunkRetryMessage(msgspec.Struct, array_like=True):
    """A chunk that was sent again: its number, why, and when, in seconds since the transfer began."""

    chunk: int
    reason: str
    at_s: float


class PrefillReport(msgspec.Struct, kw_only=True):
    """What the far side did, in its own clock. `link_*` is what its link was measured to be; 0: not yet.

    `retries` are the first of `resent_chunks`.
    """

    queued_s: float
    prefill_s: float
    cached_tokens: int
    computed_tokens: int
    transfer_s: float
    after_prefill_s: float
    raw_bytes: int
    wire_bytes: int
    chunks: int
    resent_chunks: int
    codec: str
    link_bytes_per_s: float = 0.0
    link_rtt_s: float = 0.0
    retries: list[ChunkRetryMessage] = []


class DecodeCommand(msgspec.Struct, kw_only=True):
    """POST /v1/decode on a decode worker. With `ticket`, KV of the prompt is expected from far away.

    `text` takes the place of `token_ids` of a short prompt, for instances that say `takes_text`: they tokenize it as it
    is, with `add_special_tokens` as the tokenizer would add them.
    `source`: where the prefill worker lets this one in, when decode workers dial.
    `allow_fallback`: prefill locally when that fails; otherwise the answer is 503. `hold_s`: keep what a failed sender
    brought for so long, for the gateway to name another one; 0: it names none.
    """

    request_id: str
    token_ids: list[int] = []
    text: str = ""
    add_special_tokens: bool = False
    cache_salt: str = ""
    tenant: str = ""
    priority: int = 0
    sampling: SamplingMessage
    ticket: str = ""
    source: str = ""
    timeout_s: float
    allow_fallback: bool = True
    hold_s: float = 0.0
    traceparent: str = ""
    media: list[MediaMessage] = []
    position_offset: int = 0


class FailTransferCommand(msgspec.Struct, kw_only=True):
    """POST /v1/transfers/{id}/fail on a decode worker: the prefill leg failed, do not wait."""

    reason: str
    detail: str = ""


class ContinueCommand(msgspec.Struct, kw_only=True):
    """POST /v1/transfers/{id}/continue on a decode worker: that sender failed, `ticket` names who brings the rest.

    `source` as in `DecodeCommand`; `reason` is a `FallbackReason` value. Answered with `ContinueReply`, or 409 when the
    transfer is over.
    """

    ticket: str
    source: str = ""
    reason: str
    detail: str = ""


class ContinueReply(msgspec.Struct, kw_only=True):
    """Bytes of KV that need not be sent, as they are there; 0 also when the decode command has not come yet."""

    held_bytes: int


class KeepPrefixCommand(msgspec.Struct, kw_only=True):
    """POST /v1/prefixes on a worker: keep KV of prompts that begin with `token_ids`.

    For `ttl_s` (0: as long as it runs), `pinned`, or as if it were `weight` times as costly to compute; neither takes
    an earlier order back. `compute`: have it there when this is answered.
    """

    token_ids: list[int]
    cache_salt: str = ""
    pinned: bool = False
    weight: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = 1.0
    ttl_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    compute: bool = False


class KeepPrefixReply(msgspec.Struct, kw_only=True):
    """`tokens` of the beginning are whole prefill chunks, `there_tokens` of them are in the cache; all pins' bytes."""

    tokens: int
    there_tokens: int
    pinned_bytes: int


class TransferStatus(msgspec.Struct, kw_only=True):
    """GET /v1/transfers/{id}?wait_s=S on a decode worker: answered once the sender is not listened to any more.

    `state`: "receiving"; "orphaned", the sender failed for `reason` and another one may be named; "over", complete or
    given up; "unknown", not begun or forgotten.
    """

    state: str
    reason: str = ""
    detail: str = ""


class LogprobMessage(msgspec.Struct, array_like=True):
    """(token id, natural log probability, raw bytes of the token)."""

    token_id: int
    logprob: float
    text_bytes: bytes


class StartEvent(msgspec.Struct, tag="start", kw_only=True):
    """First frame of a generation, sent together with the first token: what happened to the prompt.

    `prefilled_at` is "local" or "remote"; `fallback` is a `FallbackReason` value. `cached_tokens` are prompt
    tokens this worker's prefix cache saved from being computed (0 when remote: see `PrefillReport`);
    `received_tokens` came over the link, `computed_tokens` were prefilled here. Durations in the decode
    worker's monotonic clock from the arrival of the command: `kv_wait_s` until the KV was there or given
    up, `queued_s` + `prefill_s` of the local part, `first_token_s` until the first token was sampled.
    `continuations`: how often another sender took over; `reused_bytes` of KV it did not have to bring. Bytes and
    `transfer_s` are sums over all senders. `lossy`: the form KV travelled in that the output rests on; empty: exact.
    """

    prefilled_at: str
    fallback: str
    fallback_detail: str = ""
    prompt_tokens: int
    cached_tokens: int
    received_tokens: int
    computed_tokens: int
    kv_wait_s: float
    transfer_s: float
    raw_bytes: int
    wire_bytes: int
    queued_s: float
    prefill_s: float
    first_token_s: float
    continuations: int = 0
    reused_bytes: int = 0
    lossy: str = ""


class TokensEvent(msgspec.Struct, tag="tokens", omit_defaults=True, kw_only=True):
    """New output of one choice; see `engine.protocol.TokenEvent`."""

    index: int
    token_ids: list[int]
    text: str
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[tuple[LogprobMessage, list[LogprobMessage]]] | None = None


class FailedEvent(msgspec.Struct, tag="failed", kw_only=True):
    """The generation broke after its first frame; nothing follows."""

    reason: str
    message: str
    side: str = "decode"


class EndEvent(msgspec.Struct, tag="end", kw_only=True):
    """All choices finished; nothing follows. A body that ends without this or `failed` was cut."""

    completion_tokens: int


GenerationEvent = StartEvent | TokensEvent | FailedEvent | EndEvent


class ErrorBody(msgspec.Struct, kw_only=True):
    """Body of every non-200 answer of workers and registry."""

    reason: str
    message: str
    retryable: bool = False
    side: str = "decode"
    retry_after_s: float = 0.0


class InstanceMessage(msgspec.Struct, kw_only=True):
    """`core.cluster.Instance` on the wire; PUT /v1/instances/{name} renews the lease."""

    name: str
    role: str
    site: str
    url: str
    transfer_address: str
    model: str
    fingerprint: str
    generation: str
    state: str
    max_context_tokens: int
    queued_tokens: int = 0
    running_requests: int = 0
    kv_used_bytes: int = 0
    kv_total_bytes: int = 0
    version: str = ""
    protocol: int = 1
    takes_text: bool = False


class LeaseReply(msgspec.Struct, kw_only=True):
    """How long the registration holds without renewal."""

    lease_s: float


class InstancesReply(msgspec.Struct, kw_only=True):
    """GET /v1/instances?after=REVISION: all live instances once the revision moved on (long poll).

    `store_away_s`: for how long the registry's own store has not answered, so that they may be out of date.
    """

    revision: int
    instances: list[InstanceMessage]
    store_away_s: float = 0.0
