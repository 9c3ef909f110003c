"""The cluster file, as pydantic models: one YAML file per deployment, read by every role.

Every field's description is its documentation; `docs/configuration.md` must name each one (tested).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from farfill.config.access import AccessConfig, AdminConfig
from farfill.config.admission import AdmissionConfig
from farfill.config.routing import RoutingConfig
from farfill.config.section import Address, Name, SecretRef, Section
from farfill.core.cluster import Role


class KVTransferConfig(Section):
    chunk_size_mb: int = Field(
        default=32,
        ge=1,
        le=256,
        description="Largest transfer chunk, in MiB of raw bytes; a quarter of receive_budget_mb where that is less.",
    )
    compression: Literal["none", "lz4", "zstd", "auto"] = Field(
        default="auto", description="Lossless codec; auto measures link and codec and picks per transfer."
    )
    lossy: Literal["none", "int8", "fp8"] = Field(
        default="none",
        description="Send keys and values as 8-bit numbers with a scale per token and head, whatever compression says:"
        " smaller, but outputs may differ. States stay lossless. Equal at all workers; answers carry"
        " x-farfill-kv-lossy.",
    )
    encryption: Literal["tls", "sealed"] = Field(
        default="tls",
        description="tls: TLS 1.3 records; sealed: AES-128-GCM over 256 KiB records under keys sent inside TLS 1.3,"
        " about twice the bytes per core. Sealed is used between two workers that are both set so.",
    )
    checksum: bool = Field(
        default=True, description="XXH3-128 of each chunk's raw bytes, verified before decode may use it."
    )
    retry: int = Field(
        default=3,
        ge=0,
        le=10,
        description="How often one chunk is sent again after a negative acknowledgement or a lost connection.",
    )
    continuations: int = Field(
        default=2,
        ge=0,
        le=10,
        description="How often another prefill worker continues a transfer whose sender failed, before the prompt is"
        " prefilled near.",
    )
    timeout_ms: int = Field(
        default=4000,
        ge=50,
        le=600_000,
        description="Longest silence of the far side, in ms: no chunk and no sign of life.",
    )
    connections: Annotated[int, Field(ge=1, le=96)] | Literal["auto"] = Field(
        default="auto",
        description="Pooled TLS connections from a prefill worker to each decode worker; auto: 4, and up to 96 where"
        " loss limits each of them.",
    )
    dial: Literal["sender", "receiver"] = Field(
        default="sender",
        description="Who opens KV connections: sender, the prefill worker; receiver, the decode worker, for firewalls"
        " that let only the near side out. Whoever does not dial needs transfer_listen.",
    )
    congestion: Literal["auto", "system"] = Field(
        default="auto", description="TCP congestion control; auto: BBR where the kernel allows it, system: its default."
    )
    receive_budget_mb: int = Field(
        default=512,
        ge=64,
        le=1_048_576,
        description="Bound on KV bytes on their way to one decode worker, in MiB, shared by its senders; they wait for"
        " credit.",
    )
    allowed_peers: list[str] = Field(
        default=[],
        description="Workers to exchange KV with, as site/role/name with * as a wildcard; empty: every worker with a"
        " certificate of the cluster.",
    )


class PrefillConfig(Section):
    chunked_prefill_tokens: int = Field(
        default=2048,
        ge=16,
        le=131_072,
        description="Tokens of one prefill chunk. Part of the fingerprint: equal at all sites.",
    )
    checkpoint_every_chunks: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="Also send windows and states as they are after every so many prefill chunks, so that a prompt"
        " whose transfer breaks is continued from there; 0: only at its end. For models that have any. Part of the"
        " fingerprint.",
    )


ToolParser = Literal[
    "auto", "none", "hermes", "qwen3_coder", "llama3_json", "mistral", "deepseek_v3", "deepseek_v31", "kimi_k2"
]
ReasoningParser = Literal["auto", "none", "think", "mistral"]


class ModelConfig(Section):
    name: str = Field(min_length=1, examples=["my-model"], description="Name clients use in the model field.")
    path: Path = Field(
        examples=["models/my-model"],
        description="Folder with config.json, tokenizer.json and safetensors. Relative to this file.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="bfloat16", description="Type of weights and KV cache."
    )
    aliases: list[Annotated[str, Field(min_length=1)]] = Field(
        default=[], examples=["[gpt-4o, default]"], description="Further names clients may use for it."
    )
    remote_prefill_threshold_tokens: int | None = Field(
        default=None, ge=0, description="Threshold of this model; unset: that of routing."
    )
    max_concurrent_requests: int = Field(
        default=0, ge=0, description="Requests for this model in progress or waiting, then 429; 0: as gateway says."
    )
    tool_parser: ToolParser = Field(
        default="auto",
        description="How the model writes tool calls; auto: as its chat template teaches, none: tools are refused.",
    )
    reasoning_parser: ReasoningParser = Field(
        default="auto",
        description="Markers of reasoning, which is then told apart from the answer; auto: those of the chat template,"
        " think: <think>, mistral: [THINK], none: all is content.",
    )


class EngineConfig(Section):
    type: Literal["torch", "vllm"] = Field(
        default="torch",
        description="The model executor. torch: in the worker's process; vllm: a vLLM server that the worker starts"
        " beside it, from the same Python environment.",
    )
    vllm_args: list[str] = Field(
        default=[],
        examples=["['--tensor-parallel-size=2']"],
        description="Further flags of vLLM. With engine.type vllm, engine.threads, prefix_cache_mb and what follows"
        " are vLLM's own business: set them here.",
    )
    attach: str | None = Field(
        default=None,
        pattern=r"^(https?://[^/\s]+|unix:/.+)/?$",
        examples=["http://127.0.0.1:8000", "unix:/run/vllm.sock"],
        description="With engine.type vllm: a vLLM that runs already on this host with Farfill's connector, to be used"
        " and left running; unset: the worker starts one.",
    )
    attach_key: SecretRef | None = Field(default=None, description="What that vLLM's --api-key wants.")
    device: str = Field(
        default="cpu",
        pattern=r"^(cpu|cuda(:\d+)?|mps)$",
        examples=["cpu", "cuda", "cuda:N", "mps"],
        description="torch device.",
    )
    threads: int = Field(
        default=0, ge=0, le=1024, description="CPU threads of one worker; 0: as many as cpus, or all cores."
    )
    ranks: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Processes that one worker's model is spread over: attention by heads, experts by expert. KV may go"
        " to workers with another number. Needs device cpu and Linux; threads are divided among them.",
    )
    rank_timeout_s: float = Field(
        default=60.0,
        ge=1.0,
        le=3600.0,
        description="Longest that one rank waits for another within a step; then the worker ends.",
    )
    cpus: str | None = Field(
        default=None,
        pattern=r"^\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*$",
        examples=["'0-3'", "'0,2,8-11'"],
        description="CPUs the engine's threads are pinned to; unset: any. Linux only.",
    )
    attention: Literal["auto", "sdpa", "eager"] = Field(
        default="auto",
        description="How attention is computed. sdpa: torch's fused kernels; eager: the model's own formula; auto: sdpa"
        " where the model allows it.",
    )
    max_batch: int = Field(default=16, ge=1, le=1024, description="Sequences decoded together.")
    max_queue: int = Field(default=256, ge=1, description="Waiting sequences; more are refused with 503.")
    kv_cache_mb: int = Field(default=2048, ge=16, description="Bound on KV memory of one worker, in MiB.")
    prefix_cache_mb: int = Field(
        default=256, ge=0, description="Part of kv_cache_mb kept for prefix hits; 0 turns prefix reuse off."
    )
    prefix_ttl_s: float = Field(
        default=0.0, ge=0, description="Seconds after which KV kept for prefix hits is dropped unless used; 0: never."
    )
    step_token_budget: int = Field(
        default=256,
        ge=16,
        le=131_072,
        description="Tokens of prefill and decode in one step. A longer prefill chunk is interrupted at layer"
        " boundaries for the running streams' next tokens.",
    )
    output_reserve_tokens: int = Field(
        default=512,
        ge=1,
        description="Output tokens a request holds KV memory for from its start; for more as its output grows. On a"
        " GPU: always all of max_tokens.",
    )


class GatewayConfig(Section):
    site: Name = Field(examples=["near"], description="Site it runs at (near the users).")
    listen: Address = Field(default="127.0.0.1:8000", description="Address of the OpenAI API.")
    max_body_mb: int = Field(default=16, ge=1, le=1024, description="Largest request body, in MiB.")
    max_concurrent_requests: int = Field(
        default=256, ge=1, description="Requests in progress; more wait (admission.max_queue), or get 429."
    )
    request_timeout_s: float = Field(default=600.0, gt=0, description="Deadline of a whole request.")
    tls_cert: SecretRef | None = Field(
        default=None, description="Certificate chain of the public API (PEM); unset: plain HTTP."
    )
    tls_key: SecretRef | None = Field(default=None, description="Key of tls_cert.")
    internals: Literal["auto", "open", "closed"] = Field(
        default="auto",
        description="Whether /metrics and /v1/farfill/ answer at the public address; auto: only while there is neither"
        " access nor admin. The admin API always has them.",
    )
    media_allowed_hosts: list[Annotated[str, Field(pattern=r"^[A-Za-z0-9.-]+(:\d{1,5})?$")]] = Field(
        default_factory=list[str],
        examples=["[images.example.com, 'static.example.com:8443']"],
        description="Hosts that images are fetched from; with a port, that port alone. Empty: data URLs only.",
    )
    media_max_images: int = Field(default=8, ge=1, le=256, description="Images in one request; more get 400.")
    media_max_mb: int = Field(default=10, ge=1, le=256, description="Largest image file, in MiB.")
    media_max_megapixels: int = Field(default=33, ge=1, le=178, description="Largest image, in millions of pixels.")
    media_timeout_s: float = Field(default=5.0, gt=0, le=60, description="Seconds to fetch one image.")
    decision_log: Path | None = Field(
        default=None,
        examples=["log/decisions.jsonl"],
        description="File for every placement decision with all its inputs, for farfill replay. Relative to this file."
        " With several gateway processes, {pid} in it keeps them apart.",
    )
    decision_log_max_mb: int = Field(
        default=256, ge=1, description="Size of decision_log at which it begins anew; the former one stays as NAME.1."
    )
    record_file: Path | None = Field(
        default=None,
        examples=["log/recording.jsonl"],
        description="File for a line a prompt: lengths, keyed hashes, times, where it went; no text. For farfill plan"
        " capacity and farfill simulate --replay. Relative to this file; {pid} as in decision_log.",
    )
    record_max_mb: int = Field(
        default=256, ge=1, description="Size of record_file at which it begins anew; the former one stays as NAME.1."
    )


class EtcdConfig(Section):
    endpoints: list[Annotated[str, Field(pattern=r"^https?://.+:\d{1,5}$")]] = Field(
        min_length=1,
        examples=["['https://10.0.0.5:2379']"],
        description="Addresses of its members (https://host:port); the next one is tried when one cannot be reached.",
    )
    prefix: str = Field(
        default="/farfill/",
        pattern=r"^/[ -~]*/$",
        examples=["/farfill/"],
        description="What all keys begin with; the name of the cluster follows.",
    )
    ca: SecretRef | None = Field(
        default=None, description="CA of its members' certificates (PEM); unset: the system's."
    )
    cert: SecretRef | None = Field(default=None, description="Client certificate (PEM), where it asks for one.")
    key: SecretRef | None = Field(default=None, description="Private key of cert.")
    user: str = Field(default="", description="User to log in as; empty: no login.")
    password: SecretRef | None = Field(default=None, description="Password of user.")


class RegistryConfig(Section):
    site: Name = Field(examples=["near"], description="Site it runs at.")
    listen: Address = Field(default="127.0.0.1:7400", description="Address it listens on.")
    advertise: Address | None = Field(default=None, description="Address others reach it at; unset: listen.")
    lease_s: float = Field(
        default=5.0, ge=0.5, le=300, description="A worker that does not renew for this long is gone."
    )
    store: Literal["embedded", "etcd"] = Field(
        default="embedded",
        description="Where it keeps what it knows: embedded, in files of its own; etcd, in an etcd cluster, which"
        " several registries may share.",
    )
    data_dir: Path = Field(
        default=Path("registry-data"),
        description="Folder of the embedded store, on a local disk. Relative to this file.",
    )
    etcd: EtcdConfig | None = Field(default=None, description="The etcd cluster; needed with store: etcd.")


class WorkerConfig(Section):
    role: Annotated[Role, Field(strict=False)] = Field(examples=["decode"], description="prefill, decode or mixed.")
    site: Name = Field(examples=["near"], description="Site it runs at.")
    model: Name | None = Field(
        default=None, examples=["small"], description="Which of models it serves, by its key; unset: that of model."
    )
    listen: Address = Field(examples=["10.1.0.10:7500"], description="Address of its control API.")
    advertise: Address | None = Field(
        default=None, description="Address others reach the control API at; unset: listen."
    )
    transfer_listen: Address | None = Field(
        default=None,
        description="Address for KV connections of the side that does not dial: decode, unless kv_transfer.dial says"
        " otherwise.",
    )
    transfer_advertise: Address | None = Field(
        default=None, description="Address the dialling side reaches it at; unset: transfer_listen."
    )
    version: str = Field(
        default="",
        pattern=r"^[A-Za-z0-9._+-]{0,64}$",
        examples=["2026-12-01"],
        description="What farfill rollout worker knows its version by; unset: that of the program.",
    )
    vllm_listen: Address | None = Field(
        default=None,
        description="With engine.type vllm: address of vLLM's own API for stock routers (vllm-router), plain HTTP.",
    )


class TlsConfig(Section):
    ca: SecretRef = Field(examples=["file:pki/ca.pem"], description="CA that signed every role's certificate (PEM).")
    cert: str = Field(
        pattern=r"^(file|env):.+$",
        examples=["'file:pki/{name}.pem'"],
        description="Certificate of a role; {name} becomes the worker's name, gateway or registry.",
    )
    key: str = Field(
        pattern=r"^(file|env):.+$",
        examples=["'file:pki/{name}.key'"],
        description="Its private key; {name} as in cert.",
    )


class TicketConfig(Section):
    signing_key: SecretRef = Field(
        examples=["file:pki/ticket.key"],
        description="Ed25519 private key (PEM); read by gateways alone.",
    )
    public_key: SecretRef = Field(
        examples=["file:pki/ticket.pub"], description="Ed25519 public key (PEM); workers verify tickets with it."
    )
    lifetime_s: float = Field(default=60.0, gt=0, le=3600, description="Seconds a ticket may be presented.")
    clock_tolerance_s: float = Field(
        default=5.0, ge=0, le=300, description="Clock difference between sites that expiry tolerates."
    )


class LoggingConfig(Section):
    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe level written."
    )
    format: Literal["json", "text"] = Field(default="json", description="JSON lines or text for people.")


class ClusterConfig(Section):
    version: Literal[1] = Field(default=1, description="Version of this file's format.")
    cluster: Name = Field(default="farfill", description="Name of the deployment; part of every certificate identity.")
    model: ModelConfig
    models: dict[Name, ModelConfig] = Field(
        default={}, examples=["{small: {name: my-small-model, path: models/small}}"], description="Further models."
    )
    engine: EngineConfig = EngineConfig()
    gateway: GatewayConfig
    registry: RegistryConfig
    workers: dict[Name, WorkerConfig] = Field(
        min_length=1,
        examples=["{decode-near: {role: decode, site: near, listen: 10.1.0.10:7500, transfer_listen: 10.1.0.10:7501}}"],
        description="Workers by name.",
    )
    routing: RoutingConfig = RoutingConfig()
    admission: AdmissionConfig = AdmissionConfig()
    access: AccessConfig | None = None
    admin: AdminConfig | None = None
    kv_transfer: KVTransferConfig = KVTransferConfig()
    prefill: PrefillConfig = PrefillConfig()
    tls: TlsConfig
    tickets: TicketConfig
    logging: LoggingConfig = LoggingConfig()
