"""POST /v1/store: the registry's store for other roles, within what `registry.access` allows each of them."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
from aiohttp import web

from farfill.core.errors import FarfillError, InvalidRequestError
from farfill.registry.access import may_read, may_write
from farfill.registry.messages import message_response, refusal
from farfill.registry.records import LEASES, LeaseRecord, decode_record, encode_record
from farfill.registry.store import Batch, CompactedError, LeaseLostError, Put, Store, StoreError, Unchanged
from farfill.registry.store_wire import (
    CommitCall,
    GetCall,
    GrantCall,
    KeepAliveCall,
    RevokeCall,
    ScanCall,
    StoreCall,
    StoreReply,
    WatchCall,
    batch_message,
    entry_message,
    operation_of,
)
from farfill.transport.tls import PeerIdentity

MAX_WAIT_S = 60.0
MIN_TTL_S = 0.5
MAX_TTL_S = 24 * 3600.0
MAX_BATCHES = 256

_decoder: msgspec.msgpack.Decoder[StoreCall] = msgspec.msgpack.Decoder(StoreCall)


class ForbiddenError(StoreError):
    """This certificate may not do that."""

    reason = "forbidden"
    retryable = False


class StoreHandler:
    """Stateless: a lease's owner stands in the store, on the lease itself."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def answer(self, peer: PeerIdentity, body: bytes) -> web.Response:
        """`StoreReply`, or the refusal."""
        try:
            return message_response(await self._do(peer, _decoder.decode(body)))
        except (msgspec.DecodeError, InvalidRequestError) as error:
            return refusal(400, "invalid_request", f"not a store call: {error}")
        except (CompactedError, LeaseLostError) as error:
            return refusal(409, error.reason, str(error))
        except ForbiddenError as error:
            return refusal(403, error.reason, str(error))
        except FarfillError as error:
            return refusal(503, error.reason, str(error))

    async def _do(self, peer: PeerIdentity, call: StoreCall) -> StoreReply:  # noqa: PLR0911 (one answer a call)
        match call:
            case GetCall(key=key):
                self._check_read(peer, key)
                entry = await self._store.get(key)
                return StoreReply(entries=[] if entry is None else [entry_message(entry)])
            case ScanCall(prefix=prefix):
                self._check_read(peer, prefix)
                listing = await self._store.scan(prefix)
                return StoreReply(revision=listing.revision, entries=[entry_message(e) for e in listing.entries])
            case CommitCall():
                return await self._commit(peer, call)
            case WatchCall():
                self._check_read(peer, call.prefix)
                return await self._watch(call)
            case GrantCall(ttl_s=ttl_s):
                return await self._grant(peer, ttl_s)
            case KeepAliveCall(lease=lease):
                await self._check_owner(peer, lease)
                return StoreReply(ttl_s=await self._store.keep_alive(lease))
            case RevokeCall(lease=lease):
                with contextlib.suppress(LeaseLostError):
                    await self._check_owner(peer, lease)
                    await self._store.revoke(lease)
                return StoreReply()

    async def _commit(self, peer: PeerIdentity, call: CommitCall) -> StoreReply:
        operations = [operation_of(message) for message in call.operations]
        for operation in operations:
            if not may_write(peer, operation.key):
                raise ForbiddenError(f"{peer.uri} may not write {operation.key}")
        for lease in {o.lease for o in operations if isinstance(o, Put) and o.lease}:
            await self._check_owner(peer, lease)
        conditions = [Unchanged(key, modified) for key, modified in call.conditions]
        for condition in conditions:
            self._check_read(peer, condition.key)
        done = await self._store.commit(operations, conditions)
        return StoreReply(applied=done.applied, revision=done.revision)

    async def _watch(self, call: WatchCall) -> StoreReply:
        """`revision` is where the next poll goes on."""
        batches: list[Batch] = []
        watching = self._store.watch(call.prefix, call.after)
        wait_s = min(max(call.wait_s, 0.0), MAX_WAIT_S)
        with contextlib.suppress(TimeoutError, StopAsyncIteration):
            while len(batches) < MAX_BATCHES:
                # After the first one, only what is there already.
                async with asyncio.timeout(0.0 if batches else wait_s):
                    batches.append(await anext(watching))
        await watching.aclose()
        revision = batches[-1].revision if batches else call.after
        return StoreReply(revision=revision, batches=[batch_message(batch) for batch in batches])

    async def _grant(self, peer: PeerIdentity, ttl_s: float) -> StoreReply:
        if not MIN_TTL_S <= ttl_s <= MAX_TTL_S:
            raise InvalidRequestError(f"a lease holds {MIN_TTL_S:g} to {MAX_TTL_S:g} seconds, not {ttl_s:g}")
        lease = await self._store.grant(ttl_s)
        record = LeaseRecord(owner=peer.uri)
        await self._store.commit([Put(f"{LEASES}{lease.id}", encode_record(record), lease.id)])
        return StoreReply(lease=lease.id, ttl_s=lease.ttl_s)

    async def _check_owner(self, peer: PeerIdentity, lease: int) -> None:
        entry = await self._store.get(f"{LEASES}{lease}")
        if entry is None:
            raise LeaseLostError(f"there is no lease {lease}")
        if decode_record(entry.value, LeaseRecord).owner != peer.uri:
            raise ForbiddenError(f"lease {lease} is not {peer.uri}'s")

    @staticmethod
    def _check_read(peer: PeerIdentity, prefix: str) -> None:
        if not may_read(peer, prefix):
            raise ForbiddenError(f"{peer.uri} may not read {prefix!r}")
