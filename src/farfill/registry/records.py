"""What the registry holds, key by key. Values are msgpack; `schema` rises when a reader of the old one would err.

    instances/NAME                      InstanceRecord, on the worker's lease
    generations/NAME                    GenerationsRecord: former lives of a name, which may not come back
    links/SRC/DST                       LinkRecord: what a link between sites was measured to carry
    requests/REQUEST                    RequestRecord: where a request's KV is, on a lease
    prefixes/SITE/INSTANCE/KEY          PrefixRecord: who holds which prefix, on the worker's lease
    config/current, config/v/VERSION    ConfigRecord
    rollout/MODEL/TENANT                RolloutRecord
    breakers/SCOPE/GATEWAY              BreakerRecord: one gateway's share of a breaker's window
    observed/GATEWAY                    ObservedRecord: what one gateway saw of each rollout share
    keys/ID                             KeyRecord: an API key, as a digest
    gateways/GATEWAY                    GatewayRecord: a live gateway and its demand on shared limits, on its lease
    asks/REQUEST/ID, answers/REQUEST/ID AskRecord, AnswerRecord: one gateway asks the others for a request's life
    audit/TIME-ID                       AuditRecord: who changed what, when and why
    leases/ID                           LeaseRecord: who may use a lease, on the lease itself

Unknown fields are ignored, so a newer writer may add some.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

import msgspec

from farfill.core.errors import ProtocolError
from farfill.wire.control import InstanceMessage

INSTANCES = "instances/"
GENERATIONS = "generations/"
LINKS = "links/"
REQUESTS = "requests/"
PREFIXES = "prefixes/"
CONFIG = "config/"
ROLLOUT = "rollout/"
BREAKERS = "breakers/"
OBSERVED = "observed/"
KEYS = "keys/"
GATEWAYS = "gateways/"
ASKS = "asks/"
ANSWERS = "answers/"
AUDIT = "audit/"
LEASES = "leases/"


class RegistryRecord(msgspec.Struct, kw_only=True):
    """`schema` is the version a record was written as; `newest` the last one this program reads."""

    newest: ClassVar[int] = 1
    schema: int = 1


class InstanceRecord(RegistryRecord, kw_only=True):
    """One worker: role, site, model, fingerprint, capacity, load, state."""

    instance: InstanceMessage


class GenerationsRecord(RegistryRecord, kw_only=True):
    """The latest former generations of a worker's name, oldest first."""

    former: list[str] = []


class LinkRecord(RegistryRecord, kw_only=True):
    """What `src_site` → `dst_site` carried when it was last measured; the baseline alerts compare with."""

    src_site: str
    dst_site: str
    rate_bytes_per_s: float
    rtt_s: float
    loss_ratio: float = 0.0
    baseline_rate_bytes_per_s: float = 0.0
    baseline_rtt_s: float = 0.0
    measured_unix_s: float = 0.0


class RequestRecord(RegistryRecord, kw_only=True):
    """Where the KV of a request is computed, received and held."""

    request_id: str
    transfer_id: str = ""
    decode: str
    decode_generation: str
    prefill: str = ""
    prefill_generation: str = ""
    kv_bytes: int = 0


class PrefixRecord(RegistryRecord, kw_only=True):
    """`blocks` leading blocks of a prompt are held, with or without the states needed to go on from them."""

    generation: str
    blocks: int
    resumable: bool = True


class ConfigRecord(RegistryRecord, kw_only=True):
    """One version of the cluster file; `previous` is what a rollback returns to."""

    version: int
    text: str
    author: str
    reason: str = ""
    unix_s: float
    previous: int = 0


class RolloutRecord(RegistryRecord, kw_only=True):
    """The share of requests of one model and tenant ("*": all) that may prefill far, in percent."""

    version: int
    percent: float
    sticky: str = "session"
    automatic: bool = False
    author: str
    reason: str = ""
    unix_s: float
    salt: str = ""


class BreakerRecord(RegistryRecord, kw_only=True):
    """One gateway's counts of a breaker, as `policy.breaker` merges them."""

    gateway: str
    snapshot: dict[str, Any]


class ObservedShare(msgspec.Struct, kw_only=True):
    """What was seen under one `version` of a share. `ttft_ratio`: p95 far over near, None while not known."""

    model: str
    tenant: str
    version: int
    far_requests: int
    far_failures: int
    ttft_ratio: float | None
    link_utilisation: float
    parity_samples: int = 0
    parity_mismatches: int = 0


class ObservedRecord(RegistryRecord, kw_only=True):
    """One gateway's observations, on its lease."""

    gateway: str
    shares: list[ObservedShare]


class KeyRecord(RegistryRecord, kw_only=True):
    """One API key; `scope` is what it is for: "api", or of the admin API "admin" (everything) or "monitor" (to look).

    Rates and `expires_unix_s` of 0: none. `salt` separates its prefix KV from that of the tenant's other keys;
    `priority` is the best one its requests may ask for. After a rotation `former_digest` counts until
    `former_until_unix_s`.
    """

    id: str
    digest: str
    name: str = ""
    scope: str = "api"
    tenant: str = "default"
    models: list[str] = msgspec.field(default_factory=lambda: ["*"])
    requests_per_s: float = 0.0
    tokens_per_s: float = 0.0
    burst_s: float = 10.0
    priority: int = -100
    salt: str = ""
    allow_from: list[str] = []
    created_unix_s: float = 0.0
    expires_unix_s: float = 0.0
    former_digest: str = ""
    former_until_unix_s: float = 0.0
    author: str = ""


class GatewayRecord(RegistryRecord, kw_only=True):
    """One live gateway process. `demand`: requests and tokens a second asked of it, by shared limit."""

    gateway: str
    site: str
    version: str = ""
    address: str = ""
    started_unix_s: float = 0.0
    demand: dict[str, tuple[float, float]] = {}


class AskRecord(RegistryRecord, kw_only=True):
    """`gateway` looks for a request it did not serve; who did answers on the same `lease`.

    Without a request: all say how they are, each under its own name.
    """

    request_id: str
    gateway: str
    lease: int


class AnswerRecord(RegistryRecord, kw_only=True):
    """zlib-compressed JSON of `gateway.life.Life` or `gateway.status.GatewayStatus`."""

    packed: bytes


class AuditRecord(RegistryRecord, kw_only=True):
    """One change by a person or a guard."""

    unix_s: float
    who: str
    what: str
    why: str = ""


class LeaseRecord(RegistryRecord, kw_only=True):
    """Who was granted the lease."""

    owner: str


Kind = TypeVar("Kind", bound=RegistryRecord)

_encode = msgspec.msgpack.Encoder().encode


def encode_record(record: RegistryRecord) -> bytes:
    """msgpack bytes."""
    return _encode(record)


def decode_record(value: bytes, kind: type[Kind]) -> Kind:
    """Raises ProtocolError when the bytes are no such record, or one of a schema this program does not know."""
    try:
        record = msgspec.msgpack.decode(value, type=kind)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"no {kind.__name__}: {error}", side="registry") from error
    if record.schema > kind.newest:
        raise ProtocolError(
            f"a {kind.__name__} of schema {record.schema}, this version reads up to {kind.newest}; upgrade it",
            side="registry",
        )
    return record
