"""Finds a request's record on whichever gateway served it, whichever is asked: through the registry.

Who looks for a request that is not its own puts the question under a lease; the gateway that has it puts the answer on
the same lease. No gateway needs another one's address, so it works behind any load balancer and with several processes
on one port.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import zlib

import msgspec
import structlog

from farfill.core.errors import FarfillError, ProtocolError
from farfill.gateway.background import BackgroundWork
from farfill.gateway.life import Life, life_of
from farfill.gateway.records import RequestRecord, RequestRecords
from farfill.registry.mirror import Mirror
from farfill.registry.records import ANSWERS, ASKS, AnswerRecord, AskRecord, decode_record, encode_record
from farfill.registry.store import MAX_VALUE_BYTES, Put, Store

log = structlog.get_logger("farfill.gateway")

ANSWER_S = 1.5
LEASE_S = 10.0
MAX_ANSWER_BYTES = MAX_VALUE_BYTES - 4096
MAX_UNPACKED_BYTES = 64 << 20


class RecordLookup:
    """Owned by the event loop. `store` None: this gateway knows of no others."""

    def __init__(self, gateway: str, records: RequestRecords, store: Store | None, background: BackgroundWork) -> None:
        self._gateway = gateway
        self._records = records
        self._store = store
        self._background = background
        self._answered: set[str] = set()
        self._heard = asyncio.Event()
        self._stack = contextlib.AsyncExitStack()
        if store is not None:
            self._asks = Mirror(store, ASKS, on_change=self._asked)
            self._answers = Mirror(store, ANSWERS, on_change=self._wake)

    async def start(self) -> None:
        """Begin to listen to the others."""
        if self._store is not None:
            for mirror in (self._asks, self._answers):
                await self._stack.enter_async_context(mirror)

    async def close(self) -> None:
        """Stop."""
        await self._stack.aclose()

    async def find(self, request_id: str, *, wait_s: float = 0.0) -> bytes | None:
        """`Life` as JSON, or None when nobody has it any more. `wait_s`: for this gateway's own to end.

        Raises StoreError when it is not this gateway's and the registry cannot be asked.
        """
        found = self._records.look(request_id)
        if wait_s > 0 and (found is None or not found.outcome):
            found = await self._records.get(request_id, wait_s) or self._records.look(request_id)
        if found is not None:
            return msgspec.json.encode(life_of(found, self._gateway))
        return None if self._store is None else await self._ask(self._store, request_id)

    async def _ask(self, store: Store, request_id: str) -> bytes | None:
        lease = await store.grant(LEASE_S)
        name = f"{request_id}/{secrets.token_hex(6)}"
        try:
            ask = AskRecord(request_id=request_id, gateway=self._gateway, lease=lease.id)
            await store.commit([Put(ASKS + name, encode_record(ask), lease.id)])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    while (entry := self._answers.get(ANSWERS + name)) is None:
                        self._heard.clear()
                        await self._heard.wait()
                    return _unpacked(decode_record(entry.value, AnswerRecord).life)
            return None
        finally:
            self._background.spawn(_revoke(store, lease.id), f"asked-{request_id}")

    def _wake(self) -> None:
        self._heard.set()
        self._heard = asyncio.Event()

    def _asked(self) -> None:
        entries = self._asks.entries()
        self._answered &= {entry.key for entry in entries}
        for entry in entries:
            if entry.key in self._answered:
                continue
            self._answered.add(entry.key)
            with contextlib.suppress(ProtocolError):
                ask = decode_record(entry.value, AskRecord)
                found = self._records.look(ask.request_id)
                if found is not None and ask.gateway != self._gateway:
                    name = entry.key.removeprefix(ASKS)
                    self._background.spawn(self._answer(name, found, ask.lease), f"answer-{ask.request_id}")

    async def _answer(self, name: str, found: RequestRecord, lease: int) -> None:
        assert self._store is not None, "somebody asked through it"
        packed = await asyncio.to_thread(_packed, life_of(found, self._gateway))
        try:
            await self._store.commit([Put(ANSWERS + name, encode_record(AnswerRecord(life=packed)), lease)])
        except FarfillError as error:
            log.warning("record_not_told", request_id=found.request_id, reason=error.reason, error=str(error))


async def _revoke(store: Store, lease: int) -> None:
    with contextlib.suppress(FarfillError):
        await store.revoke(lease)


def _packed(life: Life) -> bytes:
    packed = zlib.compress(msgspec.json.encode(life))
    if len(packed) > MAX_ANSWER_BYTES:  # hundreds of candidates: without the inputs then
        record = msgspec.structs.replace(life.record, decisions=[])
        packed = zlib.compress(msgspec.json.encode(msgspec.structs.replace(life, record=record, rankings=[])))
    return packed


def _unpacked(packed: bytes) -> bytes:
    unpacking = zlib.decompressobj()
    try:
        data = unpacking.decompress(packed, MAX_UNPACKED_BYTES)
    except zlib.error as error:
        raise ProtocolError(f"another gateway's answer makes no sense: {error}", side="registry") from error
    if not unpacking.eof:
        raise ProtocolError(f"another gateway's answer is longer than {MAX_UNPACKED_BYTES} bytes", side="registry")
    return data
