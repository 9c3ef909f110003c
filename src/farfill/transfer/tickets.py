"""Signing and verifying tickets: Ed25519 over a msgpack payload, base64url. A token is never logged.

The gateway holds the private key, workers the public one. A decode worker in front of which a stock router stands signs
tickets for itself with a key that it makes at its start, and that nobody else trusts. Single use is enforced by the
receiver, which remembers the ids it has seen until they expire.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from farfill.clock import Clock
from farfill.core.errors import ConfigError, TicketError
from farfill.core.ticket import Ticket

MAX_TOKEN_CHARS = 8192
# Signed along with the payload, so that no other signature of the same key can pass for a ticket.
_DOMAIN = b"farfill-ticket-1\0"

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Ticket)


class TicketSigner:
    """Signs with a key that was parsed once."""

    def __init__(self, private_key_pem: bytes) -> None:
        """Raises ConfigError unless the PEM is an unencrypted Ed25519 private key."""
        try:
            key = load_pem_private_key(private_key_pem, password=None)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"the ticket signing key is not a PEM private key: {error}") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise ConfigError("the ticket signing key is not an Ed25519 key")
        self._key = key
        self.public_key = key.public_key()

    def sign(self, ticket: Ticket) -> str:
        """The token of `ticket`."""
        payload = _encoder.encode(ticket)
        return f"{_to_text(payload)}.{_to_text(self._key.sign(_DOMAIN + payload))}"


def sign_ticket(ticket: Ticket, private_key_pem: bytes) -> str:
    """One token. Raises ConfigError for a key that cannot sign."""
    return TicketSigner(private_key_pem).sign(ticket)


def new_signer() -> TicketSigner:
    """With a new key, which goes with this process."""
    key = Ed25519PrivateKey.generate()
    return TicketSigner(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


@dataclass(frozen=True, slots=True)
class OwnKey:
    """What decode worker `decode` permits others to send to itself is signed by `signer`."""

    decode: str
    signer: TicketSigner


class TicketVerifier:
    """Checks signature and time; who may present a ticket is `check_ticket`'s part."""

    def __init__(self, public_key_pem: bytes, clock: Clock, tolerance_s: float, own: OwnKey | None = None) -> None:
        """Raises ConfigError unless the PEM is an Ed25519 public key. `own` counts beside it, for its worker alone."""
        try:
            key = load_pem_public_key(public_key_pem)
        except ValueError as error:
            raise ConfigError(f"the ticket public key is not a PEM public key: {error}") from error
        if not isinstance(key, Ed25519PublicKey):
            raise ConfigError("the ticket public key is not an Ed25519 key")
        self._key = key
        self._clock = clock
        self._tolerance_s = tolerance_s
        self._own = own

    @property
    def tolerance_s(self) -> float:
        """Clock difference between sites that expiry tolerates."""
        return self._tolerance_s

    def verify(self, token: str) -> Ticket:
        """The ticket inside `token`.

        Raises TicketError with reason ticket_malformed, ticket_forged, ticket_not_yet_valid or ticket_expired.
        """
        payload, signature = _parts(token)
        own = None
        if not _fits(self._key, payload, signature):
            own = self._own
            if own is None or not _fits(own.signer.public_key, payload, signature):
                raise TicketError("the signature does not fit", reason="ticket_forged")
        ticket = self._ticket(payload)
        if own is not None and ticket.decode != own.decode:
            raise TicketError(f"{own.decode!r} cannot sign for {ticket.decode!r}", reason="ticket_wrong_peer")
        return ticket

    def read(self, token: str) -> Ticket:
        """What `token` says, whoever signed it: for a sender, who hands it to the receiver that verifies it.

        Raises as `verify` does, never ticket_forged.
        """
        return self._ticket(_parts(token)[0])

    def _ticket(self, payload: bytes) -> Ticket:
        try:
            ticket = _decoder.decode(payload)
        except msgspec.DecodeError as error:
            raise TicketError(f"signed, but no ticket: {error}", reason="ticket_malformed") from error
        now = self._clock.unix_s()
        if now > ticket.expires_unix_s + self._tolerance_s:
            late_s = now - ticket.expires_unix_s
            raise TicketError(f"expired {late_s:.1f} s ago by this clock", reason="ticket_expired")
        if now < ticket.issued_unix_s - self._tolerance_s:
            early_s = ticket.issued_unix_s - now
            raise TicketError(f"issued {early_s:.1f} s in the future by this clock", reason="ticket_not_yet_valid")
        return ticket


def check_ticket(ticket: Ticket, *, prefill: str, decode: str, fingerprint: str) -> None:
    """Raise TicketError unless `ticket` is for these peers (names from certificates) and this model."""
    if ticket.prefill != prefill:
        raise TicketError(f"made out to {ticket.prefill!r}, shown by {prefill!r}", reason="ticket_wrong_peer")
    if ticket.decode != decode:
        raise TicketError(f"for {ticket.decode!r}, shown to {decode!r}", reason="ticket_wrong_peer")
    if ticket.fingerprint != fingerprint:
        raise TicketError("for another model fingerprint", reason="ticket_wrong_fingerprint")


def _parts(token: str) -> tuple[bytes, bytes]:
    """(payload, signature)."""
    if len(token) > MAX_TOKEN_CHARS or token.count(".") != 1:
        raise TicketError("not a ticket", reason="ticket_malformed")
    payload, signature = (_from_text(part) for part in token.split("."))
    return payload, signature


def _fits(key: Ed25519PublicKey, payload: bytes, signature: bytes) -> bool:
    try:
        key.verify(signature, _DOMAIN + payload)
    except InvalidSignature:
        return False
    return True


def _to_text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _from_text(text: str) -> bytes:
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise TicketError("not base64url", reason="ticket_malformed") from None
