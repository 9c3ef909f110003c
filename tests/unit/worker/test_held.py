"""Prefills whose KV waits for somebody to ask: nothing is lost before the transfer begins, nothing is kept after."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from farfill.clock import WallClock
from farfill.core.cluster import FallbackReason
from farfill.core.errors import CancelledWorkError, EngineError, FarfillError
from farfill.core.ticket import Ticket
from farfill.engine.protocol import PrefillStats
from farfill.kv.manifest import Manifest
from farfill.telemetry.metrics import WorkerMetrics
from farfill.transfer.protocol import TransferStats
from farfill.transfer.tickets import TicketVerifier, new_signer
from farfill.transport.tls import PeerIdentity
from farfill.wire.held import PushCommand
from farfill.worker import held
from farfill.worker.held import HeldPrefill, HeldService
from support.pki import make_ticket_keys

STATS = PrefillStats(queued_s=0.0, compute_s=1.0, computed_tokens=9, cached_tokens=0)


class Heard:
    """An `OutgoingTransfer` that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def offer(self, pieces: Sequence[tuple[int, memoryview]]) -> None:
        self.told += [index for index, _ in pieces]

    def keepalive(self) -> None:
        self.told.append("alive")

    def finish(self) -> None:
        self.told.append("finish")

    def fail(self, reason: FallbackReason, detail: str) -> None:
        self.told.append(reason)

    async def wait(self) -> TransferStats:
        raise AssertionError


def _piece(index: int) -> tuple[int, memoryview]:
    return index, memoryview(b"x")


def test_what_came_before_goes_first_and_the_rest_as_it_comes() -> None:
    sink, transfer = HeldPrefill(), Heard()
    sink.progress()
    sink.pieces_ready([_piece(0), _piece(1)])
    sink.send(transfer)
    sink.progress()
    sink.pieces_ready([_piece(2)])
    sink.finished(STATS)
    assert transfer.told == [0, 1, "alive", 2, "finish"]
    assert sink.stats == STATS


@pytest.mark.parametrize("early", [True, False])
def test_an_end_is_told_whenever_it_comes(early: bool) -> None:
    finished, failed = HeldPrefill(), HeldPrefill()
    heard, sad = Heard(), Heard()
    for sink, transfer, end in (
        (finished, heard, lambda: finished.finished(STATS)),
        (failed, sad, lambda: failed.failed(EngineError("no"))),
    ):
        if early:
            end()
        sink.send(transfer)
        if not early:
            end()
    assert heard.told == ["finish"]
    assert sad.told == [FallbackReason.PREFILL_FAILED]


def test_withdrawn_work_is_not_a_failure() -> None:
    sink, transfer = HeldPrefill(), Heard()
    sink.send(transfer)
    sink.failed(CancelledWorkError("withdrawn"))
    assert transfer.told == []


class Handle:
    """A `PrefillHandle`."""

    manifest: Manifest

    def __init__(self) -> None:
        self.released = asyncio.Event()

    def cancel(self) -> None:
        pass

    def release(self) -> None:
        self.released.set()


class Engine:
    info = SimpleNamespace(fingerprint="f")

    def __init__(self) -> None:
        self.handles: list[Handle] = []

    def prefill(self, work: object, sink: HeldPrefill) -> Handle:
        sink.pieces_ready([_piece(0)])
        self.handles.append(Handle())
        return self.handles[-1]


def _service(engine: Engine, hold_s: float, verifier: TicketVerifier | None = None) -> HeldService:
    return HeldService(
        name="far",
        engine=engine,  # type: ignore[arg-type]
        sender=None,  # type: ignore[arg-type]
        verifier=verifier,  # type: ignore[arg-type]
        metrics=WorkerMetrics(site="far", role="prefill", model="m"),
        hold_s=hold_s,
    )


async def test_kv_that_nobody_fetches_goes_by_itself() -> None:
    engine = Engine()
    service = _service(engine, 0.01)
    service.hold("t", None)  # type: ignore[arg-type]
    assert len(service) == 1
    async with asyncio.timeout(10):
        await engine.handles[0].released.wait()
    assert len(service) == 0


async def test_closing_lets_go_of_everything() -> None:
    engine = Engine()
    service = _service(engine, 60.0)
    for name in ("a", "b"):
        service.hold(name, None)  # type: ignore[arg-type]
    service.close()
    assert all(handle.released.is_set() for handle in engine.handles)
    assert len(service) == 0


@pytest.mark.parametrize(
    ("asks", "prefill", "num_tokens", "reason"),
    [
        ("near", "far", 9, "prefill_lost"),  # all is well, but nothing of that id is held
        ("elsewhere", "far", 9, "ticket_wrong_peer"),
        (None, "far", 9, "ticket_wrong_peer"),
        ("near", "other", 9, "ticket_wrong_peer"),
    ],
)
async def test_kv_goes_to_the_worker_that_asks_for_itself(
    monkeypatch: pytest.MonkeyPatch, asks: str | None, prefill: str, num_tokens: int, reason: str
) -> None:
    """Whoever signed: the one whose certificate it is gets it, and nobody else."""
    service = _service(Engine(), 60.0, verifier=TicketVerifier(make_ticket_keys()[1], WallClock(), 1.0))
    now_s = WallClock().unix_s()
    ticket = Ticket(
        transfer_id="t",
        fingerprint="f",
        tenant="",
        prefill=prefill,
        decode="near",
        num_tokens=num_tokens,
        issued_unix_s=now_s,
        expires_unix_s=now_s + 60,
    )
    identity = None if asks is None else PeerIdentity("c", "s", "decode", asks)

    async def command(*_: object) -> PushCommand:
        return PushCommand(ticket=new_signer().sign(ticket), target="host:1", timeout_s=1.0)

    monkeypatch.setattr(held, "read_message", command)
    monkeypatch.setattr(held, "identity_of", lambda _: identity)
    with pytest.raises(FarfillError) as caught:
        await service.push(None)  # type: ignore[arg-type]
    assert caught.value.reason == reason
