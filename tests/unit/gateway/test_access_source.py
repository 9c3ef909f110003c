"""Where a request comes from: proxies that are trusted, and those that only claim to be."""

from __future__ import annotations

import pytest

from farfill.core.errors import ConfigError
from farfill.gateway.access_source import ANYWHERE, Networks, client_address, parse_address

PROXIES = Networks.of(["10.0.0.0/24", "fd00::/8"], "test")


@pytest.mark.parametrize(
    ("peer", "forwarded", "found"),
    [
        ("192.0.2.1", [], "192.0.2.1"),
        ("192.0.2.1", ["203.0.113.9"], "192.0.2.1"),  # nobody's proxy: its word counts for nothing
        ("10.0.0.1", ["203.0.113.9"], "203.0.113.9"),
        ("10.0.0.1", ["198.51.100.7, 203.0.113.9"], "203.0.113.9"),  # the left one is the client's own claim
        ("10.0.0.1", ["203.0.113.9, 10.0.0.2"], "203.0.113.9"),
        ("10.0.0.1", ["203.0.113.9", "10.0.0.2, 10.0.0.3"], "203.0.113.9"),
        ("10.0.0.1", ["10.0.0.2"], "10.0.0.2"),
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", ["unknown"], None),
        ("10.0.0.1", ["203.0.113.9:4711"], "203.0.113.9"),
        ("fd00::1", ["[2001:db8::5]:4711"], "2001:db8::5"),
        ("fd00::1", ["2001:db8::5"], "2001:db8::5"),
        ("::ffff:10.0.0.1", ["203.0.113.9"], "203.0.113.9"),
        (None, ["203.0.113.9"], None),
    ],
)
def test_address_is_the_last_one_that_no_trusted_proxy_has(
    peer: str | None, forwarded: list[str], found: str | None
) -> None:
    assert client_address(peer, forwarded, PROXIES) == parse_address(found)


def test_no_address_is_in_no_network_but_anywhere() -> None:
    assert not PROXIES.allows(None)
    assert ANYWHERE.allows(None)


def test_mistyped_network_is_told_with_its_key() -> None:
    with pytest.raises(ConfigError, match=r"access.allow_from: '10.0.0.1/8' is no network"):
        Networks.of(["10.0.0.1/8"], "access.allow_from")
