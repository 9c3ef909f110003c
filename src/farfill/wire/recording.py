"""One line of a gateway's recording: what a request was, when it came, where it went and how long each part took.

JSON lines. The first four keys are those of Mooncake's traces (arXiv 2407.00079), so that a recording is one, with
`block_tokens` tokens an id. There is no text, no token, no name of a client: ids, tenants and sessions are keyed hashes
whose key the gateway makes at its start and tells nobody.
"""

from __future__ import annotations

import msgspec

RECORDING_VERSION = 1


class RecordedPrefill(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Who computed the prompt, in its own clock: `seconds` of computing, without what others took meanwhile."""

    instance: str
    site: str
    seconds: float
    queued_s: float = 0.0
    cached_tokens: int = 0
    computed_tokens: int = 0


class RecordedTransfer(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The KV's way. `link_*` is what the sender knew of the link then; 0: nothing yet. `pieces` is how many parts the
    KV left in, `after_prefill_s` how long the last of them took once prefill was done."""

    seconds: float
    after_prefill_s: float
    raw_bytes: int
    wire_bytes: int
    pieces: int = 0
    link_bytes_per_s: float = 0.0
    link_rtt_s: float = 0.0


class RecordedEngine(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What the cluster file says of engines: a replay runs ones like them."""

    type: str
    max_batch: int
    step_tokens: int
    prefix_cache_mb: int = 0


class RecordedRequest(msgspec.Struct, omit_defaults=True, kw_only=True):
    """`timestamp` is when it came, in ms of the Unix clock; `before_s` what tokenizing and hashing took, `queued_s` the
    wait for a turn. `forced` is what the client demanded, `placed` what was decided, `placement` what happened."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []
    v: int
    block_tokens: int
    model: str
    engine: RecordedEngine
    tenant: str = ""
    session: str = ""
    outcome: str
    error: str = ""
    forced: str = ""
    placed: str = ""
    placement: str = ""
    reason: str = ""
    fallback: str = ""
    threshold_tokens: int = 0
    adaptive: bool = False
    decode: str = ""
    decode_site: str = ""
    cached_tokens: int = 0
    before_s: float = 0.0
    queued_s: float = 0.0
    ttft_s: float | None = None
    tpot_s: float | None = None
    duration_s: float
    prefill: RecordedPrefill | None = None
    transfer: RecordedTransfer | None = None
