"""Contradictions in the sections `access` and `admin`."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from farfill.config.model import ClusterConfig
from farfill.config.problems import KeyPath, Problem


def access_problems(config: ClusterConfig) -> Iterator[Problem]:
    """What no single key can tell."""
    access, admin = config.access, config.admin
    if access is not None:
        yield from _networks(("access", "allow_from"), access.allow_from)
        yield from _networks(("access", "trusted_proxies"), access.trusted_proxies)
        if access.keys == "none" and not access.jwt:
            yield Problem(("access", "keys"), "none, and no issuer of tokens: nobody could get in", "add access.jwt")
        if config.admission.tenant_header:
            yield Problem(
                ("admission", "tenant_header"),
                "with an access section, keys and tokens say whose a request is",
                "remove it, or remove access",
            )
        issuers: dict[str, str] = {}
        for name, issuer in access.jwt.items():
            if issuer.issuer in issuers:
                yield Problem(
                    ("access", "jwt", name, "issuer"), f"is that of {issuers[issuer.issuer]}, too", "keep one of them"
                )
            issuers.setdefault(issuer.issuer, name)
    if admin is not None:
        yield from _networks(("admin", "allow_from"), admin.allow_from)
        if (admin.tls_cert is None) != (admin.tls_key is None):
            given, other = ("tls_cert", "tls_key") if admin.tls_cert else ("tls_key", "tls_cert")
            yield Problem(("admin", given), f"{given} without {other}", f"add {other}, or remove {given}")
        if not admin.certificates and (access is None or access.keys == "none"):
            yield Problem(
                ("admin", "certificates"), "no certificates, and no keys: nobody could change anything", "name some"
            )
        for key in ("certificates", "monitors"):
            for number, pattern in enumerate(getattr(admin, key)):
                if pattern != "*" and pattern.count("/") != 2:
                    yield Problem(("admin", key, number), f"{pattern!r} is not site/role/name", "write */admin/*")


def _networks(path: KeyPath, texts: list[str]) -> Iterator[Problem]:
    for number, text in enumerate(texts):
        try:
            ipaddress.ip_network(text)
        except ValueError as error:
            yield Problem((*path, number), f"{text!r} is no network: {error}", "write 10.0.0.0/8 or 2001:db8::/32")
