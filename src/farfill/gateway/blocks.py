"""Follows every worker's block events into the prefix index: one connection a worker, for as long as it is alive.

Each stream begins with a snapshot and goes on with numbered changes. A number that is missing, a malformed frame or a
silence ends the stream, and the next one begins with a snapshot again. Until then the last known state is believed as
routing history is; a worker that does not tell (400, 404) is left to routing history alone.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
import structlog

from farfill.core.cluster import Instance
from farfill.core.errors import FarfillError, ProtocolError
from farfill.gateway.observe import PolicyObserver
from farfill.gateway.pipeline.place import Membership
from farfill.gateway.prefixes import PrefixView
from farfill.wire.blocks import (
    BEAT_S,
    BLOCKS_PATH,
    KEY_BYTES,
    BlocksChanged,
    BlocksHello,
    BlocksMessage,
    BlocksReader,
    BlocksSnapshot,
    split_keys,
)
from farfill.wire.control import PROTOCOL_VERSION, VERSION_HEADER

log = structlog.get_logger("farfill.gateway")

LOOK_S = 0.25
SILENCE_S = 3 * BEAT_S
FIRST_BACKOFF_S = 0.2
LAST_BACKOFF_S = 5.0
# So many keys are taken at once before other work of the loop has its turn.
KEYS_AT_ONCE = 2048


class FeedError(FarfillError):
    """A stream of block events ended; `reason` is a metric label."""

    reason = "lost"


class _NotToldError(FeedError):
    """The worker has no block events at all."""

    reason = "not_told"


@dataclass(slots=True)
class BlockFeed:
    """What one stream has said so far; pure. Feed messages in order; raises FeedError when they do not fit."""

    instance: Instance
    prefixes: PrefixView
    observer: PolicyObserver
    seq: int | None = None
    _begun: bool = False
    _in_snapshot: bool = False

    def hello(self, message: BlocksHello) -> None:
        """The first message."""
        if message.generation != self.instance.generation:
            raise FeedError(f"{self.instance.name}: another process answered", reason="generation")
        if message.chunk_tokens != self.prefixes.chunk_tokens:
            raise _NotToldError(
                f"{self.instance.name}: its blocks have {message.chunk_tokens} tokens, "
                f"prefill.chunked_prefill_tokens here is {self.prefixes.chunk_tokens}",
                reason="chunk_tokens",
            )
        self.prefixes.announces(self.instance, sparse=message.sparse)
        self._begun = True

    async def take(self, message: BlocksMessage) -> None:
        """One message."""
        if isinstance(message, BlocksHello):
            self.hello(message)
            return
        if not self._begun:
            raise ProtocolError(f"{self.instance.name}: block events do not begin with hello")
        if isinstance(message, BlocksSnapshot):
            await self._snapshot(message)
        else:
            await self._changed(message)

    async def _snapshot(self, message: BlocksSnapshot) -> None:
        if message.first:
            if self.seq is not None:
                self.observer.block_gap("overrun")
            self.prefixes.changed(self.instance.name, "cleared", ())
        elif not self._in_snapshot:
            raise ProtocolError(f"{self.instance.name}: a snapshot without its beginning")
        self._in_snapshot = not message.last
        self.seq = message.seq
        self.observer.block_events("snapshot", len(message.keys) // KEY_BYTES)
        await self._apply("stored", message.keys)

    async def _changed(self, message: BlocksChanged) -> None:
        if self.seq is None or self._in_snapshot or message.first != self.seq + 1:
            raise FeedError(f"{self.instance.name}: change {message.first} came after {self.seq}", reason="sequence")
        for kind, keys in message.changes:
            if kind not in ("stored", "removed", "cleared"):
                raise ProtocolError(f"{self.instance.name}: no block event is called {kind!r}")
            self.seq += 1
            self.observer.block_events(kind, len(keys) // KEY_BYTES)
            await self._apply(kind, keys)

    async def _apply(self, kind: str, joined: bytes) -> None:
        keys = split_keys(joined)
        for at in range(0, max(1, len(keys)), KEYS_AT_ONCE):
            self.prefixes.changed(self.instance.name, kind, keys[at : at + KEYS_AT_ONCE])
            if len(keys) > KEYS_AT_ONCE:
                await asyncio.sleep(0)


class BlockFeeds:
    """Runs between `start` and `close`."""

    def __init__(
        self,
        *,
        membership: Membership,
        prefixes: PrefixView,
        observer: PolicyObserver,
        tls: ssl.SSLContext | None,
        connect_timeout_s: float,
        server_name: Callable[[Instance], str | None],
    ) -> None:
        self._membership = membership
        self._prefixes = prefixes
        self._observer = observer
        self._tls = tls
        self._connect_timeout_s = connect_timeout_s
        self._server_name = server_name
        self._session: aiohttp.ClientSession | None = None
        self._feeds: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None

    def use_context(self, tls: ssl.SSLContext) -> None:
        """New certificates or CAs for connections to come."""
        self._tls = tls

    async def start(self) -> None:
        """Begin to follow."""
        if not self._prefixes.enabled:
            return
        limit_s = self._connect_timeout_s
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, connect=limit_s, sock_connect=limit_s, sock_read=SILENCE_S),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={VERSION_HEADER: str(PROTOCOL_VERSION)},
        )
        self._task = asyncio.create_task(self._run(), name="block-feeds")

    async def close(self) -> None:
        """End all streams."""
        tasks = [*self._feeds.values(), *([] if self._task is None else [self._task])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._feeds.clear()
        if self._session is not None:
            await self._session.close()

    async def _run(self) -> None:
        while True:
            live = {(i.name, i.generation): i for i in self._membership.instances()}
            for key in set(self._feeds) - set(live):
                self._feeds.pop(key).cancel()
            for key in set(live) - set(self._feeds):
                self._feeds[key] = asyncio.create_task(self._follow(live[key]), name=f"blocks-{key[0]}")
            self._observer.block_index(self._prefixes.blocks, self._prefixes.forgotten, self._prefixes.exact)
            await asyncio.sleep(LOOK_S)

    async def _follow(self, instance: Instance) -> None:
        backoff_s, told = FIRST_BACKOFF_S, ""
        while True:
            began_s = asyncio.get_running_loop().time()
            try:
                await self._stream(instance)
            except _NotToldError as error:
                log.info("block_events_not_told", instance=instance.name, reason=error.reason, detail=str(error))
                self._observer.block_gap(error.reason)
                return
            except (FarfillError, aiohttp.ClientError, OSError, TimeoutError) as error:
                reason = error.reason if isinstance(error, FarfillError) else "lost"
                self._observer.block_gap(reason)
                if told != reason:
                    told = reason
                    log.warning("block_events_lost", instance=instance.name, reason=reason, error=repr(error))
            finally:
                self._prefixes.silent(instance.name)
            if asyncio.get_running_loop().time() - began_s > LAST_BACKOFF_S:
                backoff_s, told = FIRST_BACKOFF_S, ""
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)

    async def _stream(self, instance: Instance) -> None:
        assert self._session is not None, "started"
        reader, feed = BlocksReader(), BlockFeed(instance, self._prefixes, self._observer)
        async with self._session.get(
            instance.url + BLOCKS_PATH,
            ssl=self._tls if self._tls is not None else True,
            server_hostname=self._server_name(instance),
        ) as response:
            if response.status in (400, 404):
                raise _NotToldError(f"{instance.name} answered {response.status}")
            if response.status != 200:
                raise FeedError(f"{instance.name} answered {response.status}", reason="refused")
            while data := await response.content.readany():
                for message in reader.feed(data):
                    await feed.take(message)
        raise FeedError(f"{instance.name}: the stream ended")
