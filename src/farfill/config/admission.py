"""The section of the cluster file that says who starts, who waits and who is turned away."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from farfill.config.section import Section

TenantName = Annotated[str, Field(pattern=r"^(\*|[A-Za-z0-9][A-Za-z0-9._-]{0,127})$")]


class TenantConfig(Section):
    requests_per_s: float = Field(
        default=0.0, ge=0, description="Requests a second over all gateway processes, then 429; 0: not limited."
    )
    tokens_per_s: float = Field(
        default=0.0,
        ge=0,
        description="Prompt and output tokens a second over all gateway processes, then 429; 0: not limited.",
    )
    burst_s: float = Field(default=10.0, gt=0, le=3600, description="Seconds of both rates that may come at once.")
    weight: float = Field(default=1.0, gt=0, description="Share of the queue's turns.")
    max_share: float = Field(
        default=1.0, gt=0, le=1, description="Part of one decode instance it may fill with waiting prompts."
    )


class AdmissionConfig(Section):
    max_queue: int = Field(
        default=256,
        ge=0,
        description="Requests that wait for one of gateway.max_concurrent_requests, or for the limits below; more get"
        " 429.",
    )
    max_queue_per_tenant: int = Field(default=128, ge=1, description="Of these, one tenant's; more get 429.")
    queue_timeout_s: float = Field(default=30.0, gt=0, description="Longest wait, then 503.")
    max_kv_tokens: int = Field(
        default=0,
        ge=0,
        description="Prompt and output tokens of all running requests of a gateway process; more wait. 0: not limited.",
    )
    max_link_mb: int = Field(
        default=0,
        ge=0,
        description="KV on its way from far sites for a gateway process, in MiB by estimate; more wait. 0: not"
        " limited.",
    )
    tenant_header: str = Field(
        default="",
        pattern=r"^[A-Za-z0-9-]*$",
        examples=["X-Tenant"],
        description="Header that names the tenant, set by a trusted proxy in front; empty: all are one tenant,"
        " default.",
    )
    tenants: dict[TenantName, TenantConfig] = Field(
        default={},
        examples=["{'*': {requests_per_s: 10}, batch: {weight: 0.5}}"],
        description="Limits by tenant; * for any other.",
    )
