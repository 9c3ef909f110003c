"""The gateway and its workers know each other by certificate, over real sockets."""

from __future__ import annotations

import ssl
from pathlib import Path

from farfill.gateway.identity import worker_context
from farfill.transport.tls import server_context
from support.authority import Authority
from support.gateway_harness import running_gateway

BODY = {"model": "tiny", "prompt": "hi", "max_tokens": 1}


def contexts(worker_uri: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The gateway's client context, and the server context of a worker with `worker_uri`."""
    authority = Authority()
    client = worker_context(*authority.issue("farfill://c/near/gateway/gateway"), authority.pem, "c")
    return client, server_context(*authority.issue(worker_uri), authority.pem)


async def test_worker_with_its_own_certificate_serves(tmp_path: Path) -> None:
    worker_tls, decode_tls = contexts("farfill://c/near/decode/decode-near")
    async with running_gateway(tmp_path, worker_tls=worker_tls, decode_tls=decode_tls) as gateway:
        for _ in range(3):
            status, answer, _ = await gateway.post("/v1/completions", BODY)
            assert status == 200, answer


async def test_another_worker_at_its_address_gets_no_prompt(tmp_path: Path) -> None:
    worker_tls, decode_tls = contexts("farfill://c/far/prefill/prefill-far")
    async with running_gateway(tmp_path, worker_tls=worker_tls, decode_tls=decode_tls) as gateway:
        status, answer, _ = await gateway.post("/v1/completions", BODY)
        assert (status, answer["error"]["code"]) == (503, "worker_unreachable")
        assert "127.0.0.1" not in answer["error"]["message"]
        assert gateway.decode.decodes == []
