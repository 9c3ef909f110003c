"""Metrics of workers and gateway, read as Prometheus would, for checks that compare what was done with what is told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from farfill.config.load import LoadedConfig
from farfill.config.secrets import read_tls
from farfill.core.cluster import Role
from farfill.core.errors import UnavailableError
from farfill.transport.tls import client_context

POLL_S = 0.1
_BUSY = (
    "farfill_running_sequences",
    "farfill_waiting_sequences",
    "farfill_queue_tokens",
    "farfill_held_transfers",
    "farfill_kv_used_bytes",
)


@dataclass(frozen=True, slots=True)
class Samples:
    """One scrape: (sample name, labels, value)."""

    entries: tuple[tuple[str, dict[str, str], float], ...]

    def total(self, name: str, **labels: str) -> float:
        """Sum over all samples of `name` with these labels; 0 when there are none."""
        return sum(
            value
            for sample, found, value in self.entries
            if sample == name and all(found.get(key) == wanted for key, wanted in labels.items())
        )

    def has(self, name: str) -> bool:
        """Whether any sample has this name (a typing error would read as 0 for ever)."""
        return any(sample == name for sample, _, _ in self.entries)


class Scraper:
    """Reads every process of one cluster file; workers over mutual TLS with the gateway's identity."""

    def __init__(self, loaded: LoadedConfig, session: aiohttp.ClientSession) -> None:
        self._config = loaded.config
        self._session = session
        tls = read_tls(loaded, "gateway")
        self._context = client_context(tls.cert_pem, tls.key_pem, tls.ca_pem)

    async def gateway(self) -> Samples:
        """The gateway's metrics."""
        async with self._session.get(f"http://{self._config.gateway.listen}/metrics") as response:
            response.raise_for_status()
            return parse_samples(await response.text())

    async def worker(self, name: str) -> Samples:
        """A worker's metrics."""
        url = f"https://{self._config.workers[name].listen}/metrics"
        async with self._session.get(url, ssl=self._context) as response:
            response.raise_for_status()
            return parse_samples(await response.text())

    async def idle(self, name: str) -> bool:
        """Whether a worker runs nothing and holds no KV beyond its prefix cache."""
        return is_idle(await self.worker(name))

    async def wait_idle(self, *names: str, deadline_s: float) -> None:
        """Wait until all named workers (none named: all) are idle. Raises UnavailableError after `deadline_s`."""
        for name in names or tuple(self._config.workers):
            await wait_until(lambda name=name: self.idle(name), f"{name} is idle", deadline_s)

    def decode_workers(self) -> list[str]:
        """Names of the workers that decode."""
        return [name for name, worker in self._config.workers.items() if worker.role is not Role.PREFILL]


def parse_samples(text: str) -> Samples:
    """`text` in Prometheus' exposition format."""
    return Samples(
        tuple(
            (sample.name, dict(sample.labels), sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        )
    )


def is_idle(samples: Samples) -> bool:
    """Nothing runs or waits, no transfer and no sequence holds KV (the prefix cache may)."""
    return all(samples.total(name) == 0 for name in _BUSY)


@contextlib.asynccontextmanager
async def scraper(loaded: LoadedConfig) -> AsyncIterator[Scraper]:
    """A scraper with its own connections."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10.0)) as session:
        yield Scraper(loaded, session)


async def wait_until(holds: Callable[[], object], what: str, deadline_s: float) -> None:
    """Poll `holds` (plain or a coroutine function) until true. Raises UnavailableError naming `what` otherwise."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + deadline_s
    while True:
        value = holds()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return
        if loop.time() > end_s:
            raise UnavailableError(f"not within {deadline_s:g} s: {what}", reason="deadline")
        await asyncio.sleep(POLL_S)
