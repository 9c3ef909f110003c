"""The plan file: a workload, sites with instances, links between them, and what must be reached."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from farfill.planner.inputs import Section


class LognormalInput(Section):
    distribution: Literal["lognormal"]
    mu: float = Field(ge=0, le=20, examples=[9.9], description="Logarithm of the median number of tokens.")
    sigma: float = Field(gt=0, le=5, examples=[1.0], description="Standard deviation of the logarithm.")
    min_tokens: int = Field(default=1, ge=1, description="Shorter prompts do not occur.")
    max_tokens: int = Field(ge=1, examples=[131072], description="Longer prompts do not occur.")


class UniformInput(Section):
    distribution: Literal["uniform"]
    min_tokens: int = Field(ge=1, examples=[128], description="Shortest prompt.")
    max_tokens: int = Field(ge=1, examples=[32768], description="Longest prompt.")


class FixedInput(Section):
    distribution: Literal["fixed"]
    tokens: int = Field(ge=1, examples=[8192], description="Length of every prompt.")


class HistogramBin(Section):
    tokens: int = Field(ge=1, examples=[4096], description="Length.")
    weight: float = Field(gt=0, examples=[0.2], description="How often, in any unit.")


class HistogramInput(Section):
    distribution: Literal["histogram"]
    bins: list[HistogramBin] = Field(min_length=1, examples=["[{tokens: 4096, weight: 1}]"], description="Lengths.")


InputLengths = Annotated[
    LognormalInput | UniformInput | FixedInput | HistogramInput, Field(discriminator="distribution")
]


class WorkloadSection(Section):
    input: InputLengths | None = Field(
        default=None, description="Tokens to prefill of each request: what no prefix cache has. Or give trace."
    )
    trace: Path | None = Field(
        default=None, description="Mooncake JSONL of real requests, relative to this file, instead of input."
    )
    cache_blocks: int | None = Field(
        default=None, ge=0, description="With trace: blocks of 512 tokens the prefix cache holds; unset: all, 0: none."
    )
    output_tokens: float | None = Field(
        default=None, gt=0, examples=[1024], description="Mean output length; unset: the trace's."
    )
    context_tokens: float | None = Field(
        default=None,
        gt=0,
        description="Mean tokens in a sequence while it is decoded; unset: prompt and half the output.",
    )
    requests_per_s: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="Requests to be served; unset: the trace's, or as many as the sites can.",
    )
    arrival_scv: float | None = Field(
        default=None,
        gt=0,
        le=1000,
        description="Squared coefficient of variation of gaps between requests; 1: Poisson.",
    )


class SizePoint(Section):
    tokens: int = Field(ge=1, examples=[8192], description="Length of the prompt.")
    mib: float = Field(gt=0, examples=[308.9], description="Size of its KV, in MiB.")


class ModelSection(Section):
    name: str = Field(min_length=1, examples=["my-model"], description="Name clients use.")
    config: Path | None = Field(default=None, description="config.json or its folder, relative to this file.")
    like: str | None = Field(default=None, description="Known model type to read an unknown one as.")
    kv_dtype: str | None = Field(default=None, description="Type of the cache; unset: the config's.")
    kv_sizes: list[SizePoint] = Field(default=[], description="Instead of config: published or measured sizes.")


class SloSection(Section):
    tpot_ms: float = Field(gt=0, examples=[25], description="Longest time per output token.")
    ttft_s: float | None = Field(default=None, gt=0, description="Longest time to the first token.")
    quantile: float = Field(default=0.9, gt=0, lt=1, description="Share of requests that must meet ttft_s.")


class SiteSection(Section):
    instances: int = Field(ge=0, le=1_000_000, examples=[8], description="Instances there are, or may be bought.")
    profile: Path | None = Field(default=None, description="Profile file, relative to this file.")
    accelerator: str | None = Field(default=None, description="Instead of profile: roofline estimate for this one.")
    gpus_per_instance: int = Field(default=8, ge=1, description="With accelerator: how many make an instance.")
    weight_bytes: float = Field(default=2.0, gt=0, le=4, description="With accelerator: bytes of one weight.")
    price_per_instance_hour: float = Field(default=1.0, gt=0, description="In any currency; alike when unset.")


class LinkSection(Section):
    source: str = Field(min_length=1, examples=["far"], description="Site that prefills.")
    gbit_per_s: float = Field(gt=0, examples=[100], description="What the link carries: `farfill link measure`.")
    rtt_ms: float = Field(default=0.0, ge=0, le=10_000, description="Round trip.")
    compression: float = Field(
        default=1.0, ge=1, le=10, description="How many times smaller KV is on the wire: `farfill link measure`."
    )


class PlanningSection(Section):
    headroom: float = Field(default=0.3, ge=0, le=10, description="Capacity beyond the demand, as a share of it.")
    link_utilisation: float = Field(default=0.7, gt=0, le=1, description="Share of a link that may be planned with.")
    times_at: Literal["all_lengths", "mean_length"] = Field(
        default="all_lengths",
        description="Prefill times are averaged over all lengths, or that of the mean length is taken (the paper).",
    )
    chunk_tokens: int = Field(default=2048, ge=16, description="prefill.chunked_prefill_tokens of the cluster file.")


class PlanFile(Section):
    version: Literal[1] = Field(default=1, description="Version of this file's format.")
    model: ModelSection
    workload: WorkloadSection
    slo: SloSection
    near: str = Field(min_length=1, examples=["near"], description="Site with the users; it decodes.")
    sites: dict[str, SiteSection] = Field(
        min_length=1, examples=["{near: {instances: 8, profile: near.yaml}}"], description="Sites by name."
    )
    links: list[LinkSection] = Field(default=[], description="Links to the near site, one for each far site.")
    planning: PlanningSection = PlanningSection()
