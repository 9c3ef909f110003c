"""A gateway talks to a worker only when the certificate is exactly that worker's."""

from __future__ import annotations

import ssl

import pytest

from farfill.gateway.identity import worker_context
from farfill.transport.tls import server_context
from support.authority import Authority


def handshake(client: ssl.SSLContext, server: ssl.SSLContext, name: str) -> None:
    """Both ends in memory; raises what the client's handshake raises."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = client.wrap_bio(to_client, to_server, server_hostname=name)
    far = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(10):
        for end in (near, far):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    near.do_handshake()


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def contexts(authority: Authority, server_uri: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    mine = authority.issue("farfill://c/near/gateway/gateway")
    theirs = authority.issue(server_uri)
    return worker_context(*mine, authority.pem, "c"), server_context(*theirs, authority.pem)


def test_the_right_worker_is_accepted(authority: Authority) -> None:
    handshake(*contexts(authority, "farfill://c/near/decode/decode-near"), "decode-near")


@pytest.mark.parametrize(
    "uri",
    [
        "farfill://c/far/prefill/prefill-far",
        "farfill://other/near/decode/decode-near",
        "farfill://c/near/registry/decode-near",
        "spiffe://c/near/decode/decode-near",
    ],
)
def test_anybody_else_is_refused_in_the_handshake(authority: Authority, uri: str) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(*contexts(authority, uri), "decode-near")


def test_another_authority_is_refused(authority: Authority) -> None:
    client, _ = contexts(authority, "farfill://c/near/decode/decode-near")
    _, server = contexts(Authority(), "farfill://c/near/decode/decode-near")
    with pytest.raises(ssl.SSLError):
        handshake(client, server, "decode-near")
