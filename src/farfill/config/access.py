"""Sections of the cluster file that say who may use the API, and who may look into a gateway and change it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from farfill.config.section import Address, Name, SecretRef, Section

# Whether it is a network is checked with the file: `config.checks`.
Network = Annotated[str, Field(pattern=r"^[0-9a-fA-F.:]+(/\d{1,3})?$")]
Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "Ed25519"]
"""Public-key ones only: with HS256 whoever can check a token could make one."""


class JwtConfig(Section):
    """One issuer of tokens."""

    issuer: str = Field(
        min_length=1, examples=["https://login.example.com/"], description="What the token's iss must be, exactly."
    )
    audience: list[Annotated[str, Field(min_length=1)]] = Field(
        min_length=1, examples=["[farfill]"], description="What its aud must name: one of these."
    )
    jwks: str = Field(
        pattern=r"^(file:.+|https://.+)$",
        examples=["https://login.example.com/.well-known/jwks.json", "file:jwks.json"],
        description="The issuer's public keys: https:// address or file:PATH, read again while running.",
    )
    jwks_ca: SecretRef | None = Field(default=None, description="CA of the host of jwks (PEM); unset: the system's.")
    jwks_refresh_s: float = Field(
        default=300.0, ge=1, le=86_400, description="Age at which the keys are read again, in seconds."
    )
    algorithms: list[Algorithm] = Field(
        default=["RS256", "ES256"], min_length=1, description="Signature algorithms that count; any other is refused."
    )
    tenant_claim: str = Field(
        default="sub", min_length=1, description="Claim with the tenant's name; a dot goes into an object."
    )
    models_claim: str = Field(
        default="",
        description="Claim with the models it may use, a list or words with spaces between; empty: as models says.",
    )
    models: list[str] = Field(default=["*"], description="Models such a token may use, with * as a wildcard.")
    priority_claim: str = Field(
        default="", description="Claim with the best priority its requests may have, -100 to 100; empty: any."
    )
    leeway_s: float = Field(default=30.0, ge=0, le=600, description="Clock difference that exp and nbf tolerate.")


class AccessConfig(Section):
    keys: Literal["registry", "file", "none"] = Field(
        default="registry",
        description="Where API keys are kept: registry, for all gateways at once; file, in keys_file; none, tokens"
        " (jwt) only.",
    )
    keys_file: Path = Field(
        default=Path("keys.json"),
        description="The file of keys: file. It holds digests, no keys. Relative to this file.",
    )
    pepper: SecretRef | None = Field(
        default=None,
        description="Secret that digests of keys are made with (HMAC); a stolen key store is then worth nothing. At"
        " least 16 bytes, equal at all gateways.",
    )
    jwt: dict[Name, JwtConfig] = Field(
        default={}, description="Issuers whose tokens (JWT) count, by any name; for OpenID Connect, the provider."
    )
    allow_from: list[Network] = Field(
        default=[],
        examples=["[10.0.0.0/8]"],
        description="Networks the API may be called from; empty: any. A key may name narrower ones.",
    )
    trusted_proxies: list[Network] = Field(
        default=[],
        examples=["[10.0.0.7/32]"],
        description="Proxies whose X-Forwarded-For is believed.",
    )


class AdminConfig(Section):
    listen: Address = Field(
        examples=["127.0.0.1:8001"], description="Address of the admin API: TLS, a client certificate or an admin key."
    )
    advertise: Address | None = Field(default=None, description="Address commands reach it at; unset: listen.")
    tls_cert: SecretRef | None = Field(
        default=None, description="Certificate chain (PEM); unset: the gateway's own of tls.cert."
    )
    tls_key: SecretRef | None = Field(default=None, description="Key of tls_cert.")
    certificates: list[str] = Field(
        default=["*/gateway/*", "*/admin/*"],
        description="Client certificates of the cluster that may do everything, as site/role/name with * as a"
        " wildcard; empty: admin keys only.",
    )
    monitors: list[str] = Field(
        default=["*"], description="Client certificates that may look but change nothing, in the same form."
    )
    allow_from: list[Network] = Field(default=[], description="Networks it may be called from; empty: any.")
