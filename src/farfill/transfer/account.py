"""What one outgoing transfer has sent so far. Not locked: the owner serialises calls."""

from __future__ import annotations

from collections import Counter

from farfill.kv.codec import Codec
from farfill.transfer.grid import Chunk
from farfill.transfer.protocol import ChunkRetry, TransferStats

MAX_RETRIES_TOLD = 64


class SentAccount:
    """Bytes and chunks count once, however often they travel; `wire_bytes` counts each time. Times are of one clock."""

    def __init__(self, began_s: float) -> None:
        self.resent_chunks = 0
        self.finish_called_s = began_s
        self.ended_s = began_s
        self._retries: list[ChunkRetry] = []
        self._began_s = began_s
        self._first_byte_s = began_s
        self._wire_bytes = 0
        self._raw_bytes = 0
        self._counted: set[tuple[int, int]] = set()
        self._codecs: Counter[str] = Counter()
        self._carriers: set[int] = set()

    def sent(self, chunk: Chunk, wire_bytes: int, codec: Codec, connection: int, now_s: float) -> None:
        """A chunk leaves on a connection."""
        if not self._wire_bytes:
            self._first_byte_s = now_s
        place = (chunk.piece, chunk.offset)
        if place not in self._counted:
            self._counted.add(place)
            self._raw_bytes += chunk.nbytes
        self._wire_bytes += wire_bytes
        self._codecs[codec.name.lower()] += chunk.nbytes
        self._carriers.add(connection)

    def resent(self, chunk: int, reason: str, now_s: float) -> None:
        """A chunk has to leave again."""
        self.resent_chunks += 1
        if len(self._retries) < MAX_RETRIES_TOLD:
            self._retries.append(ChunkRetry(chunk, reason, now_s - self._began_s))

    def recut(self) -> None:
        """What left so far does not count: it was cut in another way."""
        self._counted.clear()
        self._raw_bytes = 0

    def stats(self) -> TransferStats:
        """The account so far."""
        return TransferStats(
            raw_bytes=self._raw_bytes,
            wire_bytes=self._wire_bytes,
            chunks=len(self._counted),
            resent_chunks=self.resent_chunks,
            codec=self._codecs.most_common(1)[0][0] if self._codecs else Codec.NONE.name.lower(),
            connections=len(self._carriers),
            first_byte_s=self._first_byte_s - self._began_s,
            total_s=self.ended_s - self._began_s,
            after_prefill_s=max(0.0, self.ended_s - self.finish_called_s),
            retries=tuple(self._retries),
        )
