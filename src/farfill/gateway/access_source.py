"""Where a request comes from, and whether it may: networks, and proxies that speak for their clients."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from farfill.core.errors import ConfigError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

FORWARDED = "X-Forwarded-For"
MAX_HOPS = 32


@dataclass(frozen=True, slots=True)
class Networks:
    """A list of networks; an empty one has every address."""

    networks: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...] = ()

    @classmethod
    def of(cls, texts: Iterable[str], where: str) -> Networks:
        """Raises ConfigError naming `where` on a text that is no network."""
        found: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        for text in texts:
            try:
                found.append(ipaddress.ip_network(text))
            except ValueError as error:
                raise ConfigError(f"{where}: {text!r} is no network: {error}; write 10.0.0.0/8") from error
        return cls(tuple(found))

    def __bool__(self) -> bool:
        return bool(self.networks)

    def has(self, address: Address | None) -> bool:
        """Whether `address` is in one of them."""
        return address is not None and any(address in network for network in self.networks)

    def allows(self, address: Address | None) -> bool:
        """The same; where there are none, everybody is."""
        return not self.networks or self.has(address)


ANYWHERE = Networks()


def parse_address(text: str | None) -> Address | None:
    """An address without zone; IPv4 written as IPv6 becomes IPv4. None when it is none."""
    try:
        found = ipaddress.ip_address((text or "").partition("%")[0])
    except ValueError:
        return None
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        return found.ipv4_mapped
    return found


def client_address(peer: str | None, forwarded: Iterable[str], trusted: Networks) -> Address | None:
    """Who really asks: the last address that is not of a trusted proxy, read from the nearest hop on.

    `forwarded` are the values of all X-Forwarded-For headers, in order. What a client wrote there itself stands further
    left and is never reached. None when a trusted proxy wrote something that is no address.
    """
    address = parse_address(peer)
    if not trusted or not trusted.has(address):
        return address
    hops = [hop.strip() for value in forwarded for hop in value.split(",")]
    for hop in reversed(hops[-MAX_HOPS:]):
        address = parse_address(_without_port(hop))
        if address is None or not trusted.has(address):
            return address
    return address


def _without_port(hop: str) -> str:
    """Some proxies add the port: 10.0.0.1:1234, or [2001:db8::1]:1234."""
    if hop.startswith("["):
        return hop[1:].partition("]")[0]
    return hop.rpartition(":")[0] if hop.count(":") == 1 else hop
