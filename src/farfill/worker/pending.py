"""Transfers a decode worker waits for, by id, so that the gateway can end a wait that has become pointless.

The failure of the prefill leg may be told before the decode command was read; it is kept, bounded in number
and dropped oldest first, until the wait begins.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from farfill.core.cluster import FallbackReason
from farfill.transfer.protocol import ExpectedTransfer

MAX_EARLY_FAILURES = 1024


class PendingTransfers:
    """Owned by the event loop; not thread-safe."""

    def __init__(self) -> None:
        self._waiting: dict[str, ExpectedTransfer] = {}
        self._early: OrderedDict[str, tuple[FallbackReason, str]] = OrderedDict()

    @contextmanager
    def waiting(self, transfer_id: str, expected: ExpectedTransfer) -> Iterator[None]:
        """Register the wait; a failure told earlier ends it at once."""
        early = self._early.pop(transfer_id, None)
        if early is not None:
            expected.fail(*early)
        self._waiting[transfer_id] = expected
        try:
            yield
        finally:
            del self._waiting[transfer_id]

    def fail(self, transfer_id: str, reason: FallbackReason, detail: str) -> bool:
        """End the wait for `transfer_id`, now or when it begins. Returns whether it was waiting."""
        expected = self._waiting.get(transfer_id)
        if expected is not None:
            expected.fail(reason, detail)
            return True
        self._early[transfer_id] = (reason, detail)
        while len(self._early) > MAX_EARLY_FAILURES:
            self._early.popitem(last=False)
        return False

    def __len__(self) -> int:
        return len(self._waiting)
