"""Snapshots and a log of records on a disk, safe against a crash at any write.

    state-N   everything before log-N, published whole: a frame holding `SavedState`
    log-N     one frame per durable write: magic, length, XXH3-64 of the body, body `(frame number, records)`

Only the last frame can be torn, because a frame is written when the one before it is durable. A torn last frame
was never acknowledged and is cut off. A bad frame with a good one after it is damage, and is refused: cutting it
off would silently undo what was acknowledged.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct

import msgspec
import xxhash

from farfill.registry.disk import Disk, SyncFailedError
from farfill.registry.state import KeyValueState, Record, SavedState
from farfill.registry.store import StoreError

MAGIC = b"FFj\x01"
_HEADER = Struct("<4sIQ")
_DAMAGED = "restore the folder from a copy, or remove it: workers register again by themselves"


class Frame(msgspec.Struct, array_like=True, frozen=True):
    """The body of one log frame."""

    number: int
    records: list[Record]


_encode = msgspec.msgpack.Encoder().encode
_frame_decoder = msgspec.msgpack.Decoder(Frame)
_state_decoder = msgspec.msgpack.Decoder(SavedState)


class DamagedError(StoreError):
    """The files contradict themselves."""

    reason = "store_damaged"
    retryable = False


class Journal:
    """Owned by one thread at a time. `size` is the log's length in bytes."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._sequence = 0
        self._frames = 0
        self._broken = False
        self.size = 0
        self.cut_bytes = 0

    def load(self, born: int) -> KeyValueState:
        """What was last made durable; a new store begins at revision `born`. Raises DamagedError, OSError."""
        states = sorted(int(name[6:]) for name in self._disk.names() if name.startswith("state-"))
        if not states:
            if logs := [name for name in self._disk.names() if name.startswith("log-")]:
                raise DamagedError(f"{logs[0]} without its snapshot; {_DAMAGED}")
            state = KeyValueState(born)
            self._begin(1, state.saved())
            return state
        self._sequence = states[-1]
        state = self._load_state()
        self._replay(state)
        self._forget_before(self._sequence)
        return state

    def append(self, records: Sequence[Record]) -> None:
        """Make `records` durable, all or none. Raises StoreError; nothing was written then."""
        if self._broken:
            raise StoreError("the disk failed before; restart the registry", reason="disk_failed", retryable=False)
        frame = _framed(_encode(Frame(self._frames, list(records))))
        try:
            self._disk.append(self._log, frame)
        except SyncFailedError as error:
            self._broken = True
            raise StoreError(f"the disk failed: {error.strerror}", reason="disk_failed", retryable=False) from error
        except OSError as error:
            self._undo()
            raise StoreError(f"the disk refused: {error.strerror}", reason="disk_refused") from error
        self._frames += 1
        self.size += len(frame)

    def rotate(self, saved: SavedState) -> None:
        """Begin a new log after the snapshot `saved`, and forget the old one. Raises OSError."""
        self._begin(self._sequence + 1, saved)
        self._forget_before(self._sequence)

    @property
    def _log(self) -> str:
        return f"log-{self._sequence:010d}"

    def _begin(self, sequence: int, saved: SavedState) -> None:
        try:
            self._disk.publish(f"state-{sequence:010d}", _framed(_encode(saved)))
        except SyncFailedError:
            self._broken = True  # a restart may find the snapshot, which knows nothing of what the old log gets next
            raise
        self._sequence, self._frames, self.size = sequence, 0, 0
        try:
            self._disk.publish(self._log, b"")
        except OSError:
            self._broken = True  # from the snapshot on, the old log counts no more, and there is none to write to
            raise

    def _load_state(self) -> KeyValueState:
        name = f"state-{self._sequence:010d}"
        body = _body_at(self._disk.read(name), 0)
        if body is None:
            raise DamagedError(f"{name} is damaged; {_DAMAGED}")
        return KeyValueState.restored(_state_decoder.decode(body))

    def _replay(self, state: KeyValueState) -> None:
        if self._log not in self._disk.names():
            self._disk.publish(self._log, b"")
        data, at = self._disk.read(self._log), 0
        while (body := _body_at(data, at)) is not None:
            frame = _frame_decoder.decode(body)
            if frame.number != self._frames:
                raise DamagedError(f"{self._log}: frame {frame.number} where {self._frames} belongs; {_DAMAGED}")
            for record in frame.records:
                state.apply(record)
            self._frames += 1
            at += _HEADER.size + len(body)
        if _good_frame_after(data, at + 1):
            raise DamagedError(f"{self._log} is damaged at byte {at}; {_DAMAGED}")
        self.size, self.cut_bytes = at, len(data) - at
        if self.cut_bytes:
            self._disk.truncate(self._log, at)

    def _undo(self) -> None:
        try:
            self._disk.truncate(self._log, self.size)
        except OSError:
            self._broken = True

    def _forget_before(self, sequence: int) -> None:
        for name in self._disk.names():
            kind, _, number = name.partition("-")
            if kind in ("state", "log") and int(number) < sequence:
                self._disk.remove(name)


def _framed(body: bytes) -> bytes:
    return _HEADER.pack(MAGIC, len(body), xxhash.xxh3_64_intdigest(body)) + body


def _body_at(data: bytes, at: int) -> bytes | None:
    """The body of the good frame at `at`, or None."""
    if at + _HEADER.size > len(data):
        return None
    magic, length, digest = _HEADER.unpack_from(data, at)
    body = data[at + _HEADER.size : at + _HEADER.size + length]
    if magic != MAGIC or len(body) != length or xxhash.xxh3_64_intdigest(body) != digest:
        return None
    return body


def _good_frame_after(data: bytes, at: int) -> bool:
    while (at := data.find(MAGIC, at)) >= 0:
        if _body_at(data, at) is not None:
            return True
        at += 1
    return False
