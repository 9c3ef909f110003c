"""Transfers over a real TCP path with rate, round trip, loss and cuts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from farfill.testing.lab import Lab
from farfill.transfer.protocol import TransferStats
from support.transfer_harness import BytesSlot, Ends, config, make_pieces, transfer_threads

pytestmark = pytest.mark.lab

NUM_TOKENS = 20_000  # about 30 MB
RATE = 200e6


class Site:
    """An event loop in a thread that lives at a site."""

    def __init__(self, lab: Lab, name: str) -> None:
        self._lab = lab
        self._name = name
        self._ready: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = Thread(target=self._run)
        self._thread.start()
        self.loop = self._ready.result(5)

    def _run(self) -> None:
        with self._lab.inside(self._name), asyncio.Runner() as runner:
            loop = runner.get_loop()
            self._ready.set_result(loop)
            loop.run_forever()

    def call(self, coroutine: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()


class Sites:
    """Both ends of the transfer plane, each at its site."""

    def __init__(self, lab: Lab, folder: Path, **options: Any) -> None:
        self.near, self.far = Site(lab, "near"), Site(lab, "far")
        self.ends = Ends(folder)
        self.ends.receiver = self.ends.make_receiver(listen=f"{lab.address('near')}:0", config=config(**options))
        self.ends.sender = self.ends.make_sender(config=config(**options))
        self.near.call(self.ends.receiver.start()).result(5)
        self.far.call(self.ends.sender.start()).result(5)
        self.data = make_pieces(self.ends.manifest(NUM_TOKENS))

    def move(self, during: Callable[[], None] = lambda: None) -> tuple[float, TransferStats]:
        """One transfer, with something done meanwhile; seconds and the sender's account."""
        ends = self.ends
        ticket, slot = ends.ticket(NUM_TOKENS), BytesSlot(ends.manifest(NUM_TOKENS))
        started_s = time.monotonic()

        async def receive() -> Any:
            return await ends.receiver.expect(ticket, slot, timeout_s=4).wait()

        async def send() -> TransferStats:
            address = ends.receiver.address
            outgoing = ends.sender.begin(ticket, ends.sign(ticket), address, slot.manifest, timeout_s=4)
            outgoing.offer(self.data)
            outgoing.finish()
            return await outgoing.wait()

        receiving, sending = self.near.call(receive()), self.far.call(send())
        during()
        result, stats = receiving.result(60), sending.result(60)
        assert result.complete
        assert [bytes(piece) for _, piece in self.data] == [bytes(memory) for memory in slot.memory]
        return time.monotonic() - started_s, stats

    def close(self) -> None:
        self.far.call(self.ends.sender.close()).result(10)
        self.near.call(self.ends.receiver.close()).result(10)
        assert self.ends.receiver.held_transfers() == 0
        assert self.ends.receiver.budget.leased_bytes == 0
        assert self.ends.sender.active_transfers() == 0
        self.near.close()
        self.far.close()
        assert transfer_threads() == []


def test_cut_in_the_middle_costs_little_more_than_the_cut_and_resends_only_what_was_on_its_way(
    lab: Lab, tmp_path: Path
) -> None:
    link = lab.link("near", "far")
    link.set(rate_bits_per_s=RATE, rtt_s=0.03)
    sites = Sites(lab, tmp_path, timeout_ms=4000)
    in_flight: list[int] = []
    try:
        sites.move()
        undisturbed_s, _ = sites.move()

        def cut() -> None:
            time.sleep(0.5)
            link.cut()
            seen = sites.ends.sender_seen.counts, sites.ends.receiver_seen.counts
            time.sleep(2.0)
            in_flight.append(seen[0]["sent:none"] - seen[1]["received:none"])
            link.heal()

        disturbed_s, stats = sites.move(cut)
        assert sites.ends.sender_seen.counts["resent:connection_lost"] >= 1, "TCP alone would have waited longer"
        assert stats.resent_chunks <= 1.1 * in_flight[0] + 2
        assert disturbed_s <= undisturbed_s + 2.0 + 1.5
    finally:
        sites.close()


def test_lossy_path_with_cubic_gets_more_connections(lab: Lab, tmp_path: Path) -> None:
    for site in ("near", "far"):
        lab.set_congestion_control(site, "cubic")
    lab.link("near", "far").set(rate_bits_per_s=RATE, rtt_s=0.03, loss=0.002)
    sites = Sites(lab, tmp_path, congestion="system", connections="auto")
    try:
        sites.move()
        (link,) = sites.ends.sender._links.values()
        assert link.connections > 4
        assert sites.ends.sender_seen.counts["path"] > 0
    finally:
        sites.close()


def test_bbr_keeps_few_connections_on_the_same_path(lab: Lab, tmp_path: Path) -> None:
    for site in ("near", "far"):
        lab.set_congestion_control(site, "bbr")
    lab.link("near", "far").set(rate_bits_per_s=RATE, rtt_s=0.03, loss=0.002)
    sites = Sites(lab, tmp_path, connections="auto")
    try:
        sites.move()
        (link,) = sites.ends.sender._links.values()
        assert link.connections == 4
    finally:
        sites.close()


@pytest.mark.parametrize("encryption", ["tls", "sealed"])
def test_path_with_loss_and_jitter_delivers_bit_equal(lab: Lab, tmp_path: Path, encryption: str) -> None:
    lab.link("near", "far").set(rate_bits_per_s=RATE, rtt_s=0.02, jitter_s=0.005, loss=0.01)
    sites = Sites(lab, tmp_path, encryption=encryption)
    try:
        sites.move()
    finally:
        sites.close()
