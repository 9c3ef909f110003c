"""A gateway on a loopback port in front of stub workers, with the real OpenAI client and a plain HTTP one."""

from __future__ import annotations

import io
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from openai import AsyncOpenAI

from farfill.config.model import ClusterConfig
from farfill.core.cluster import Instance, Role
from farfill.gateway.access import Access
from farfill.gateway.access_observe import AccessObserver, SilentAccessObserver
from farfill.gateway.app import SERVICE, build_runner
from farfill.gateway.observe import RequestSummary, SilentObserver
from farfill.gateway.service import GatewayDeps, GatewayService
from farfill.gateway.tokenizer import LoadedTokenizer, load_tokenizer
from farfill.registry.store import Store
from support.stub_worker import StubWorker, Transfers, sign_stub_ticket
from support.tiny_tokenizer import write_model_folder


class RecordingObserver(SilentObserver):
    """Keeps what it heard."""

    def __init__(self) -> None:
        self.accepted = 0
        self.finished: list[RequestSummary] = []
        self.legs: list[str] = []
        self.retries: list[str] = []
        self.deaths: list[tuple[str, bool]] = []
        self.continued: list[tuple[str, str]] = []
        self.media: list[tuple[str, int]] = []
        self.media_refusals: list[str] = []

    def request_accepted(self) -> None:
        self.accepted += 1

    def request_finished(self, summary: RequestSummary) -> None:
        self.finished.append(summary)

    def prefill_leg_ended(self, prefill: Instance, outcome: str, seconds: float, wire_bytes: int) -> None:
        self.legs.append(outcome)

    def prefill_continued(self, reason: str, outcome: str) -> None:
        self.continued.append((reason, outcome))

    def media_loaded(self, source: str, nbytes: int) -> None:
        self.media.append((source, nbytes))

    def media_refused(self, reason: str) -> None:
        self.media_refusals.append(reason)

    def instance_died(self, instance: Instance, *, over: bool) -> None:
        self.deaths.append((instance.name, over))

    def decode_retried(self, decode: Instance, reason: str) -> None:
        self.retries.append(reason)


@dataclass
class StubMembership:
    """Who the gateway believes is alive."""

    workers: list[StubWorker] = field(default_factory=list)

    def instances(self) -> tuple[Instance, ...]:
        return tuple(worker.instance for worker in self.workers)


@dataclass(kw_only=True)
class Harness:
    """What a test talks to."""

    base: str
    service: GatewayService
    observer: RecordingObserver
    membership: StubMembership
    decode: StubWorker
    prefill: StubWorker
    http: aiohttp.ClientSession
    openai: AsyncOpenAI

    async def post(self, path: str, body: object, **headers: str) -> tuple[int, Any, aiohttp.ClientResponse]:
        """Status, parsed JSON and response of a POST; `body` is JSON, or bytes as they are."""
        kwargs: dict[str, Any] = {"data": io.BytesIO(body)} if isinstance(body, bytes) else {"json": body}
        async with self.http.post(self.base + path, headers=headers, **kwargs) as response:
            return response.status, await response.json(), response

    async def get(self, path: str) -> tuple[int, Any, aiohttp.ClientResponse]:
        async with self.http.get(self.base + path) as response:
            return response.status, await response.json(), response

    async def record(self, request_id: str) -> dict[str, Any]:
        """The published record of a request."""
        status, body, _ = await self.get(f"/v1/farfill/requests/{request_id}?wait_s=10")
        assert status == 200, body
        return body


def make_config(model_path: Path, **sections: dict[str, Any]) -> ClusterConfig:
    """A two-site cluster with a threshold of 32 tokens and prefill chunks of 16; sections are merged in."""
    base: dict[str, dict[str, Any]] = {
        "model": {"name": "tiny", "path": model_path},
        "gateway": {"site": "near"},
        "registry": {"site": "near"},
        "workers": {"d": {"role": "decode", "site": "near", "listen": "h:1", "transfer_listen": "h:2"}},
        "routing": {"remote_prefill_threshold_tokens": 32, "allow_placement_override": True},
        "prefill": {"chunked_prefill_tokens": 16},
        "tls": {"ca": "file:ca", "cert": "file:cert", "key": "file:key"},
        "tickets": {"signing_key": "file:k", "public_key": "file:p"},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return ClusterConfig.model_validate(base)


@asynccontextmanager
async def running_gateway(
    folder: Path,
    *,
    context_tokens: int = 512,
    chat_template: bool | str = True,
    worker_tls: ssl.SSLContext | None = None,
    decode_tls: ssl.SSLContext | None = None,
    store: Store | None = None,
    vision: bool = False,
    door: Access | None = None,
    entrance: AccessObserver | None = None,
    more_models: Mapping[str, LoadedTokenizer] | None = None,
    workers: Sequence[StubWorker] = (),
    **sections: dict[str, Any],
) -> AsyncIterator[Harness]:
    """Start two stubs and a gateway; stop everything at the end."""
    options: dict[str, Any] = {"context_tokens": context_tokens}
    if chat_template is not True:
        options["chat_template"] = chat_template or None
    model_path = write_model_folder(folder / "model", **options, vision=vision)
    transfers = Transfers()
    decode = StubWorker("decode-near", Role.DECODE, transfers, tls=decode_tls)
    prefill = StubWorker("prefill-far", Role.PREFILL, transfers, site="far")
    await decode.start()
    await prefill.start()
    for worker in workers:
        await worker.start()
    membership, observer = StubMembership([decode, prefill, *workers]), RecordingObserver()
    deps = GatewayDeps(
        config=make_config(model_path, **sections),
        model=load_tokenizer(model_path),
        membership=membership,
        sign_ticket=sign_stub_ticket,
        worker_tls=worker_tls,
        observer=observer,
        store=store,
        access=door,
        entrance=entrance or SilentAccessObserver(),
        more_models=more_models or {},
        # Images are fetched from servers of the test.
        may_fetch_from=lambda address: address == "127.0.0.1",
        metrics=lambda: (b"farfill_up 1\n", "text/plain; version=0.0.4; charset=utf-8"),
    )
    runner = build_runner(deps, shutdown_timeout_s=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    base = f"http://127.0.0.1:{runner.addresses[0][1]}"
    openai = AsyncOpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=20)
    try:
        async with aiohttp.ClientSession() as http:
            yield Harness(
                base=base,
                service=runner.app[SERVICE],
                observer=observer,
                membership=membership,
                decode=decode,
                prefill=prefill,
                http=http,
                openai=openai,
            )
    finally:
        await openai.close()
        await runner.cleanup()
        for worker in (prefill, decode, *workers):
            await worker.stop()
