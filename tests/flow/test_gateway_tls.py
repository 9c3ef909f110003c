"""The gateway and its workers know each other by certificate, over real sockets."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

from farfill.gateway.identity import worker_context
from farfill.transport.certificates import ServerContext
from farfill.transport.tls import server_context
from support.authority import Authority
from support.gateway_harness import running_gateway
from support.pki import Pki, make_pki

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


async def test_certificates_and_ca_change_while_a_request_runs(tmp_path: Path) -> None:
    """Old CA, both, new one only, on both ends: the running request ends well, and the next ones are served."""
    old, new = make_pki(tmp_path / "old"), make_pki(tmp_path / "new")
    old_ca, new_ca = old.ca.read_bytes(), new.ca.read_bytes()

    def client(pki: Pki, cas: bytes) -> ssl.SSLContext:
        cert, key, _ = pki.name("gateway", role="gateway").pems
        return worker_context(cert, key, cas, "test")

    def worker(pki: Pki, cas: bytes) -> ssl.SSLContext:
        cert, key, _ = pki.name("decode-near").pems
        return server_context(cert, key, cas)

    served = ServerContext(worker(old, old_ca))
    async with running_gateway(tmp_path, worker_tls=client(old, old_ca), decode_tls=served.context) as gateway:
        held = gateway.decode.hold_after_first = asyncio.Event()
        streamed = {**BODY, "max_tokens": 3, "stream": True}
        async with gateway.http.post(f"{gateway.base}/v1/completions", json=streamed) as running:
            await running.content.readany()  # its first token is here, so decode waits now
            gateway.decode.hold_after_first = None
            connections = gateway.service.client
            for pki, cas in ((old, old_ca + new_ca), (new, old_ca + new_ca), (new, new_ca)):
                served.replace(worker(pki, cas))
                connections.use_context(client(pki, cas))
                status, answer, _ = await gateway.post("/v1/completions", BODY)
                assert status == 200, answer
            held.set()
            rest = await running.content.read()
        assert rest.endswith(b"data: [DONE]\n\n")
        assert b"error" not in rest
        connections.use_context(client(old, new_ca))
        status, answer, _ = await gateway.post("/v1/completions", BODY)
        assert status == 503, "the old certificate is worth nothing now"
        assert answer["error"]["code"] in ("worker_lost", "worker_unreachable")
