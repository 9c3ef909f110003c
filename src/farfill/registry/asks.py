"""Questions to all gateways, through the store: put under a lease, answered on the same lease, gone with it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import zlib

from farfill.core.errors import FarfillError, ProtocolError
from farfill.registry.records import ANSWERS, ASKS, GATEWAYS, AnswerRecord, AskRecord, decode_record, encode_record
from farfill.registry.store import Put, Store

ANSWER_S = 1.5
LOOK_S = 0.03
LEASE_S = 10.0
MAX_UNPACKED_BYTES = 64 << 20


async def ask_for_request(store: Store, asker: str, request_id: str) -> bytes | None:
    """JSON of the request's life from whichever gateway has it; None: none has. Raises StoreError, ProtocolError."""
    answers = await _ask(store, asker, request_id, 1)
    return answers[0] if answers else None


async def ask_for_status(store: Store, asker: str) -> list[bytes]:
    """JSON of every gateway's status that answered in time. Raises StoreError, ProtocolError."""
    alive = len((await store.scan(GATEWAYS)).entries)
    return await _ask(store, asker, "", alive) if alive else []


async def _ask(store: Store, asker: str, request_id: str, wanted: int) -> list[bytes]:
    lease = await store.grant(LEASE_S)
    name = f"{request_id or '@status'}/{secrets.token_hex(6)}"
    found: list[bytes] = []
    try:
        ask = AskRecord(request_id=request_id, gateway=asker, lease=lease.id)
        await store.commit([Put(ASKS + name, encode_record(ask), lease.id)])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                while len(found) < wanted:
                    await asyncio.sleep(LOOK_S)
                    entries = (await store.scan(ANSWERS + name)).entries
                    found = [decode_record(entry.value, AnswerRecord).packed for entry in entries]
    finally:
        with contextlib.suppress(FarfillError):
            await store.revoke(lease.id)
    return [_unpacked(packed) for packed in found]


def _unpacked(packed: bytes) -> bytes:
    unpacking = zlib.decompressobj()
    try:
        data = unpacking.decompress(packed, MAX_UNPACKED_BYTES)
    except zlib.error as error:
        raise ProtocolError(f"a gateway's answer makes no sense: {error}", side="registry") from error
    if not unpacking.eof:
        raise ProtocolError(f"a gateway's answer is longer than {MAX_UNPACKED_BYTES} bytes", side="registry")
    return data
