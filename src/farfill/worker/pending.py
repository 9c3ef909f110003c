"""Transfers a decode worker waits for, by id: the gateway ends a pointless wait, or names another sender.

What it says may come before the decode command was read; it is kept, bounded in number and dropped oldest first,
until the wait begins. Ids of transfers that are over are remembered likewise, so that nothing is kept for them.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeVar

from farfill.core.cluster import FallbackReason
from farfill.transfer.handover import Handover, HandoverRefusedError, SenderStatus
from farfill.transfer.handover_machine import HandoverState, NextSender

MAX_EARLY = 1024
MAX_OVER = 4096

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class _Told:
    """What the gateway said of a transfer: its sender failed, and maybe who continues."""

    reason: FallbackReason
    detail: str
    sender: NextSender | None = None


class PendingTransfers:
    """Owned by the event loop; not thread-safe."""

    def __init__(self) -> None:
        self._waiting: dict[str, Handover] = {}
        self._early: OrderedDict[str, _Told] = OrderedDict()
        self._over: OrderedDict[str, None] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    def follow(self, transfer_id: str, handover: Handover) -> None:
        """`handover` expects that transfer from now on; what was told earlier counts at once."""
        self._waiting[transfer_id] = handover
        told = self._early.pop(transfer_id, None)
        if told is None:
            return
        if told.sender is None:
            handover.fail(told.reason, told.detail)
        else:
            task = asyncio.get_running_loop().create_task(_proceed(handover, transfer_id, told, told.sender))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def over(self, handover: Handover) -> None:
        """Nothing of `handover` is awaited any more."""
        for transfer_id in [key for key, other in self._waiting.items() if other is handover]:
            del self._waiting[transfer_id]
            _remember(self._over, transfer_id, None, MAX_OVER)

    def fail(self, transfer_id: str, reason: FallbackReason, detail: str) -> bool:
        """No other sender will come for `transfer_id`. Returns whether it was waiting; if not, it counts later."""
        handover = self._waiting.get(transfer_id)
        if handover is not None:
            handover.fail(reason, detail)
            return True
        if transfer_id not in self._over:
            _remember(self._early, transfer_id, _Told(reason, detail), MAX_EARLY)
        return False

    async def proceed(self, transfer_id: str, sender: NextSender, reason: FallbackReason, detail: str) -> int:
        """`sender` takes the place of the one of `transfer_id`, now or when the wait begins.

        Returns the bytes that need not come. Raises HandoverRefusedError when it is over.
        """
        handover = self._waiting.get(transfer_id)
        if handover is not None:
            return await handover.proceed(transfer_id, sender, reason, detail)
        if transfer_id in self._over:
            raise HandoverRefusedError("the transfer is over")
        _remember(self._early, transfer_id, _Told(reason, detail, sender), MAX_EARLY)
        return 0

    async def status(self, transfer_id: str, wait_s: float) -> SenderStatus | None:
        """How the transfer stands once its sender is not listened to, at most `wait_s` from now; None: unknown."""
        handover = self._waiting.get(transfer_id)
        if handover is not None:
            return await handover.status(transfer_id, wait_s)
        return SenderStatus(HandoverState.OVER) if transfer_id in self._over else None

    def __len__(self) -> int:
        return len(set(self._waiting.values()))


async def _proceed(handover: Handover, transfer_id: str, told: _Told, sender: NextSender) -> None:
    try:
        await handover.proceed(transfer_id, sender, told.reason, told.detail)
    except HandoverRefusedError:
        # The gateway learns it from what decode starts with.
        handover.fail(told.reason, told.detail)


def _remember(kept: OrderedDict[str, _Value], key: str, value: _Value, limit: int) -> None:
    kept[key] = value
    while len(kept) > limit:
        kept.popitem(last=False)
