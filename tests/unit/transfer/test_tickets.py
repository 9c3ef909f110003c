"""Tickets: who may push what, until when."""

from __future__ import annotations

import base64
from dataclasses import replace

import msgspec
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

from farfill.clock import VirtualClock
from farfill.core.errors import ConfigError, TicketError
from farfill.core.ticket import Ticket
from farfill.transfer.limits import fallback_reason
from farfill.transfer.tickets import OwnKey, TicketSigner, TicketVerifier, check_ticket, new_signer, sign_ticket
from support.pki import make_ticket_keys

PRIVATE, PUBLIC = make_ticket_keys()
NOW = 1_700_000_000.0
TICKET = Ticket(
    transfer_id="t",
    fingerprint="f",
    tenant="acme",
    prefill="p",
    decode="d",
    num_tokens=9,
    issued_unix_s=NOW,
    expires_unix_s=NOW + 60,
)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(unix_s=NOW)


@pytest.fixture
def verifier(clock: VirtualClock) -> TicketVerifier:
    return TicketVerifier(PUBLIC, clock, 5.0)


def reason(verifier: TicketVerifier, token: str) -> str:
    with pytest.raises(TicketError) as caught:
        verifier.verify(token)
    assert fallback_reason(caught.value.reason) == "ticket_invalid"
    assert token not in str(caught.value)
    return caught.value.reason


def test_signed_ticket_is_read_back(verifier: TicketVerifier) -> None:
    assert verifier.verify(sign_ticket(TICKET, PRIVATE)) == TICKET


def test_expiry_tolerates_the_clock_error_and_no_more(clock: VirtualClock, verifier: TicketVerifier) -> None:
    token = sign_ticket(TICKET, PRIVATE)
    clock.advance(65.0)
    assert verifier.verify(token) == TICKET
    clock.advance(0.1)
    assert reason(verifier, token) == "ticket_expired"


def test_ticket_from_the_future_tolerates_the_clock_error_and_no_more(verifier: TicketVerifier) -> None:
    assert verifier.verify(sign_ticket(replace(TICKET, issued_unix_s=NOW + 5), PRIVATE))
    late = replace(TICKET, issued_unix_s=NOW + 5.1)
    assert reason(verifier, sign_ticket(late, PRIVATE)) == "ticket_not_yet_valid"


def test_any_changed_character_is_noticed(verifier: TicketVerifier) -> None:
    token = sign_ticket(TICKET, PRIVATE)
    for position in range(0, len(token) - 1, 7):
        other = "A" if token[position] != "A" else "B"
        changed = token[:position] + other + token[position + 1 :]
        assert reason(verifier, changed) in ("ticket_forged", "ticket_malformed")


def test_own_key_counts_beside_the_gateways_for_tickets_to_oneself_alone(clock: VirtualClock) -> None:
    own = OwnKey(TICKET.decode, new_signer())
    verifier = TicketVerifier(PUBLIC, clock, 5.0, own)
    assert verifier.verify(own.signer.sign(TICKET)) == TICKET
    assert verifier.verify(sign_ticket(TICKET, PRIVATE)) == TICKET
    assert reason(verifier, own.signer.sign(replace(TICKET, decode="another"))) == "ticket_wrong_peer"
    assert verifier.verify(sign_ticket(replace(TICKET, decode="another"), PRIVATE)).decode == "another"
    assert reason(verifier, new_signer().sign(TICKET)) == "ticket_forged"
    clock.advance(70.0)
    assert reason(verifier, own.signer.sign(TICKET)) == "ticket_expired"


def test_own_key_of_one_worker_is_forgery_to_others(verifier: TicketVerifier) -> None:
    assert reason(verifier, new_signer().sign(TICKET)) == "ticket_forged"


def test_a_sender_reads_what_it_cannot_verify(clock: VirtualClock, verifier: TicketVerifier) -> None:
    token = new_signer().sign(TICKET)
    assert verifier.read(token) == TICKET
    clock.advance(70.0)
    for bad in (token, "x", "a.b"):
        with pytest.raises(TicketError):
            verifier.read(bad)


def test_other_key_is_forgery(verifier: TicketVerifier) -> None:
    assert reason(verifier, sign_ticket(TICKET, make_ticket_keys()[0])) == "ticket_forged"


def test_signature_over_something_else_is_no_ticket(verifier: TicketVerifier) -> None:
    signer = TicketSigner(PRIVATE)
    payload = msgspec.msgpack.encode({"hello": 1})
    signature = signer._key.sign(b"farfill-ticket-1\0" + payload)
    token = ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in (payload, signature))
    assert reason(verifier, token) == "ticket_malformed"
    bare = signer._key.sign(payload)
    token = ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in (payload, bare))
    assert reason(verifier, token) == "ticket_forged"


@given(st.text(max_size=200))
def test_any_text_is_refused_with_a_typed_error(text: str) -> None:
    verifier = TicketVerifier(PUBLIC, VirtualClock(), 5.0)
    for token in (text, f"{text}.{text}", "é.é", "x" * 10_000):
        with pytest.raises(TicketError):
            verifier.verify(token)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"prefill": "x"}, "ticket_wrong_peer"),
        ({"decode": "x"}, "ticket_wrong_peer"),
        ({"fingerprint": "x"}, "ticket_wrong_fingerprint"),
    ],
)
def test_ticket_is_bound_to_peers_and_model(changes: dict[str, str], expected: str) -> None:
    check_ticket(TICKET, prefill="p", decode="d", fingerprint="f")
    with pytest.raises(TicketError) as caught:
        check_ticket(replace(TICKET, **changes), prefill="p", decode="d", fingerprint="f")
    assert caught.value.reason == expected


def test_keys_of_another_kind_are_refused(clock: VirtualClock) -> None:
    other = ec.generate_private_key(ec.SECP256R1())
    private = other.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = other.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    for bad in (private, b"no key"):
        with pytest.raises(ConfigError):
            TicketSigner(bad)
    for bad in (public, b"no key"):
        with pytest.raises(ConfigError):
            TicketVerifier(bad, clock, 5.0)
