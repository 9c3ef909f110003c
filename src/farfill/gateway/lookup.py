"""Finds a request's record on whichever gateway served it, whichever is asked, and tells what each gateway sees.

Through the registry (`registry.asks`): no gateway needs another one's address, so it works behind any load balancer and
with several processes on one port.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import Callable

import msgspec
import structlog

from farfill.core.errors import FarfillError, ProtocolError
from farfill.gateway.background import BackgroundWork
from farfill.gateway.life import Life, life_of
from farfill.gateway.records import RequestRecord, RequestRecords
from farfill.gateway.status import GatewayStatus
from farfill.registry.asks import ask_for_request
from farfill.registry.mirror import Mirror
from farfill.registry.records import ANSWERS, ASKS, AnswerRecord, AskRecord, decode_record, encode_record
from farfill.registry.store import MAX_VALUE_BYTES, Put, Store

log = structlog.get_logger("farfill.gateway")

MAX_ANSWER_BYTES = MAX_VALUE_BYTES - 4096


class RecordLookup:
    """Owned by the event loop. `store` None: this gateway knows of no others."""

    def __init__(self, gateway: str, records: RequestRecords, store: Store | None, background: BackgroundWork) -> None:
        self._gateway = gateway
        self._records = records
        self._store = store
        self._background = background
        self._status: Callable[[], GatewayStatus] | None = None
        self._answered: set[str] = set()
        self._asks = None if store is None else Mirror(store, ASKS, on_change=self._asked)
        self._running = contextlib.AsyncExitStack()

    def tell_status(self, status: Callable[[], GatewayStatus]) -> None:
        """What to answer those who ask how all gateways are."""
        self._status = status

    async def start(self) -> None:
        """Begin to listen to the others."""
        if self._asks is not None:
            await self._running.enter_async_context(self._asks)

    async def close(self) -> None:
        """Stop."""
        await self._running.aclose()

    async def find(self, request_id: str, *, wait_s: float = 0.0) -> bytes | None:
        """`Life` as JSON, or None when nobody has it any more. `wait_s`: for this gateway's own to end.

        Raises StoreError when it is not this gateway's and the registry cannot be asked.
        """
        if wait_s > 0 and self._records.runs(request_id):
            await self._records.next(request_id, wait_s)
        found = self._records.look(request_id)
        if found is not None:
            return msgspec.json.encode(life_of(found, self._gateway))
        return None if self._store is None else await ask_for_request(self._store, self._gateway, request_id)

    def _asked(self) -> None:
        assert self._asks is not None, "it called"
        entries = self._asks.entries()
        self._answered &= {entry.key for entry in entries}
        for entry in entries:
            if entry.key in self._answered:
                continue
            self._answered.add(entry.key)
            with contextlib.suppress(ProtocolError):
                ask = decode_record(entry.value, AskRecord)
                if ask.gateway != self._gateway:
                    self._tell(entry.key.removeprefix(ASKS), ask)

    def _tell(self, name: str, ask: AskRecord) -> None:
        if not ask.request_id:
            if self._status is not None:
                packed = zlib.compress(msgspec.json.encode(self._status()))
                self._background.spawn(self._answer(f"{name}/{self._gateway}", packed, ask.lease), f"status-{name}")
        elif (found := self._records.look(ask.request_id)) is not None:
            self._background.spawn(self._tell_life(name, found, ask.lease), f"answer-{ask.request_id}")

    async def _tell_life(self, name: str, found: RequestRecord, lease: int) -> None:
        await self._answer(name, await asyncio.to_thread(_packed, life_of(found, self._gateway)), lease)

    async def _answer(self, name: str, packed: bytes, lease: int) -> None:
        assert self._store is not None, "somebody asked through it"
        try:
            await self._store.commit([Put(ANSWERS + name, encode_record(AnswerRecord(packed=packed)), lease)])
        except FarfillError as error:
            log.warning("answer_not_told", name=name, reason=error.reason, error=str(error))


def _packed(life: Life) -> bytes:
    packed = zlib.compress(msgspec.json.encode(life))
    if len(packed) > MAX_ANSWER_BYTES:  # hundreds of candidates: without the inputs then
        record = msgspec.structs.replace(life.record, decisions=[])
        packed = zlib.compress(msgspec.json.encode(msgspec.structs.replace(life, record=record, rankings=[])))
    return packed
