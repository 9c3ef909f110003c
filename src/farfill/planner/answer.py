"""What `farfill plan capacity` answers, as it is written to a baseline file. Infinite times are null."""

from __future__ import annotations

from pathlib import Path

import msgspec

from farfill.core.errors import ConfigError

ANSWER_VERSION = 1


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds; null: never, because a pool is overloaded."""

    mean_s: float | None
    p50_s: float | None
    p90_s: float | None
    p99_s: float | None


class FarPart(msgspec.Struct, frozen=True, kw_only=True):
    """One far site of an option. What the planned rate asks of its link: `gbit_per_s` of raw KV, `wire_gbit_per_s` when
    it is compressed (null in baselines of before); `utilisation`: demand over what the whole link carries, so above 1
    it cannot."""

    site: str
    instances: int
    share_of_far: float
    gbit_per_s: float
    utilisation: float
    wire_gbit_per_s: float | None = None


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One way to serve the workload. Capacity is where its scarcest stage ends; everything else is at `rate_per_s`.

    `threshold_tokens` null: nothing goes far. Throughputs of stages are those of the equations of arXiv 2604.15039.
    """

    name: str
    near_prefill: int
    near_decode: int
    far: list[FarPart]
    threshold_tokens: int | None
    far_share: float
    far_mean_tokens: float
    near_mean_tokens: float
    far_per_s: float
    near_prefill_per_s: float
    decode_per_s: float
    capacity_per_s: float
    bound: str
    rate_per_s: float
    ttft_unloaded: Latency
    ttft_queued: Latency
    tpot_s: float | None
    decode_batch: float
    goodput_per_s: float
    most_goodput_per_s: float
    price_per_hour: float
    price_per_million_tokens: float | None
    price_per_million_output_tokens: float | None


class LinkCase(msgspec.Struct, frozen=True, kw_only=True):
    """What the same instances serve when every link carries `gbit_per_s` in total."""

    factor: float
    gbit_per_s: float
    capacity_per_s: float
    threshold_tokens: int
    near_prefill: int
    near_decode: int
    bound: str


class LinkStudy(msgspec.Struct, frozen=True, kw_only=True):
    """`knee_gbit_per_s`: less than this and the sites serve less (0: the link does not matter);
    `break_even_gbit_per_s`: less than this and one site for the same money serves more (null: never, or always).
    All rates are of raw KV; times `wire_share` they are what the links themselves must carry, compressed."""

    knee_gbit_per_s: float
    break_even_gbit_per_s: float | None
    far_instance_gbit_per_s: float
    cases: list[LinkCase]
    wire_share: float = 1.0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The plan. `pays`: cross-site prefill serves more for the money than one site. `arrival_scv`: squared coefficient
    of variation of gaps between requests that TTFT is predicted for."""

    version: int = ANSWER_VERSION
    model: str
    workload: str
    sources: dict[str, str]
    mean_input_tokens: float
    mean_uncached_tokens: float
    mean_output_tokens: float
    demand_per_s: float | None
    rate_per_s: float
    tpot_limit_s: float
    ttft_limit_s: float | None
    quantile: float
    headroom: float
    link_utilisation_limit: float
    plan: Option
    alternatives: list[Option]
    gain_at_equal_cost: float | None
    pays: bool
    verdict: str
    link: LinkStudy | None
    warnings: list[str]
    arrival_scv: float = 1.0


def write_answer(path: Path, answer: Answer) -> None:
    """Raises ConfigError when it cannot be written."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(answer), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


def read_answer(path: Path) -> Answer:
    """Raises ConfigError when it cannot be read or is of another version."""
    try:
        answer = msgspec.json.decode(path.read_bytes(), type=Answer)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}; `farfill plan capacity --baseline` writes it"
        ) from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: no capacity baseline: {error}") from error
    if answer.version != ANSWER_VERSION:
        raise ConfigError(f"{path}: a baseline of version {answer.version}, this is {ANSWER_VERSION}: plan again")
    return answer
