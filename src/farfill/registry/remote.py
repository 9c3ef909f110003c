"""The store as other roles see it: the registry's, over mutual TLS. Implements `store.Store`."""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Self

import msgspec

from farfill.core.errors import FarfillError
from farfill.registry.client import CALL_TIMEOUT_S, POLL_WAIT_S, RegistryCalls
from farfill.registry.store import (
    Batch,
    Committed,
    CompactedError,
    Entry,
    Lease,
    LeaseLostError,
    Listing,
    Operation,
    StoreError,
    Unchanged,
    check_commit,
)
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
    batch_of,
    entry_of,
    operation_message,
)

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(StoreReply)


class RemoteStore:
    """What may be read and written depends on the certificate: see `registry.access`."""

    def __init__(self, registry_url: str, ssl_context: ssl.SSLContext | None) -> None:
        self._calls = RegistryCalls(registry_url, ssl_context, None)

    async def __aenter__(self) -> Self:
        self._calls.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._calls.close()

    def use_context(self, context: ssl.SSLContext) -> None:
        """New certificates or CAs for connections to come."""
        self._calls.use_context(context)

    @property
    def born(self) -> int:
        """Not told to others."""
        return 0

    async def get(self, key: str) -> Entry | None:
        """The entry of `key`."""
        reply = await self._call(GetCall(key))
        return entry_of(reply.entries[0]) if reply.entries else None

    async def scan(self, prefix: str) -> Listing:
        """All entries under `prefix`."""
        reply = await self._call(ScanCall(prefix))
        return Listing(tuple(entry_of(entry) for entry in reply.entries), reply.revision)

    async def commit(self, operations: Sequence[Operation], conditions: Sequence[Unchanged] = ()) -> Committed:
        """After "unreachable" or "timeout" it may have happened all the same."""
        check_commit(operations, conditions)
        call = CommitCall([operation_message(o) for o in operations], [(c.key, c.modified) for c in conditions])
        reply = await self._call(call)
        return Committed(reply.applied, reply.revision)

    async def watch(self, prefix: str, after: int) -> AsyncGenerator[Batch]:
        """One long poll after another."""
        while True:
            reply = await self._call(WatchCall(prefix, after, POLL_WAIT_S), POLL_WAIT_S + CALL_TIMEOUT_S)
            for message in reply.batches:
                yield batch_of(message)
            after = reply.revision

    async def grant(self, ttl_s: float) -> Lease:
        """Only this certificate's holder can use it."""
        reply = await self._call(GrantCall(ttl_s))
        return Lease(reply.lease, reply.ttl_s)

    async def keep_alive(self, lease: int) -> float:
        """Renew."""
        return (await self._call(KeepAliveCall(lease))).ttl_s

    async def revoke(self, lease: int) -> None:
        """End it now."""
        await self._call(RevokeCall(lease))

    async def _call(self, call: StoreCall, timeout_s: float = CALL_TIMEOUT_S) -> StoreReply:
        try:
            answer = await self._calls.call("POST", "/v1/store", timeout_s=timeout_s, body=_encode(call))
            return _decoder.decode(answer)
        except msgspec.DecodeError as error:
            raise StoreError(f"the registry's answer makes no sense: {error}", reason="protocol_violation") from error
        except FarfillError as error:
            raise _store_error(error) from error


def _store_error(error: FarfillError) -> StoreError:
    if error.reason == CompactedError.reason:
        return CompactedError(0)
    if error.reason == LeaseLostError.reason:
        return LeaseLostError(str(error))
    return StoreError(str(error), reason=error.reason, retryable=error.retryable)
