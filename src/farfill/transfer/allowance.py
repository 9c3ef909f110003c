"""How much may be on its way to one receiver: its credit, and what it granted before ACCEPT. Pure."""

from __future__ import annotations

import math

from farfill.wire.frames import EarlyGrant


class Allowance:
    """Not locked: the owner serialises calls.

    Bytes are reserved for a chunk about to be encoded, then sent, and settled once acknowledged or void.
    """

    def __init__(self) -> None:
        self._credit_bytes = math.inf
        self._grant = EarlyGrant()
        self._unsettled_bytes = 0
        self._reserved_bytes = 0
        self._early_bytes = 0
        self._withheld = False

    def granted(self, credit_bytes: int, grant: EarlyGrant) -> None:
        """The receiver allows so many unacknowledged bytes, and so much before ACCEPT. One chunk may always travel."""
        self._credit_bytes = credit_bytes
        self._grant = grant

    @property
    def chunk_limit_bytes(self) -> float:
        """The largest chunk the receiver takes, once it has told."""
        return self._grant.chunk_bytes or math.inf

    @property
    def unsettled_bytes(self) -> int:
        """What is on its way."""
        return self._unsettled_bytes

    @property
    def ahead_bytes(self) -> int:
        """What leaves or arrives before a chunk that is sent now."""
        return self._unsettled_bytes + self._reserved_bytes

    @property
    def withheld(self) -> bool:
        """Whether the credit did not cover the chunk asked for last."""
        return self._withheld

    def reserve(self, nbytes: int) -> bool:
        """Whether the credit covers one more chunk; its bytes count from now on."""
        ahead = self.ahead_bytes
        self._withheld = ahead > 0 and ahead + nbytes > self._credit_bytes
        if not self._withheld:
            self._reserved_bytes += nbytes
        return not self._withheld

    def encoded(self, nbytes: int) -> None:
        """What was reserved is sent by now, or never will be."""
        self._reserved_bytes -= nbytes

    def sent(self, wire_bytes: int) -> None:
        """They count until they are settled."""
        self._unsettled_bytes += wire_bytes

    def settled(self, wire_bytes: int) -> bool:
        """They count no longer. Whether somebody was refused credit before."""
        withheld, self._withheld = self._withheld, False
        self._unsettled_bytes -= wire_bytes
        return withheld

    def reserve_early(self, chunk_bytes: int, total_bytes: int, useful_bytes: int) -> int:
        """How many of a transfer's bytes may leave before ACCEPT: no more than is useful or granted."""
        if chunk_bytes > self._grant.chunk_bytes:
            return 0
        nbytes = max(0, min(total_bytes, useful_bytes, self._grant.early_bytes - self._early_bytes))
        self._early_bytes += nbytes
        return nbytes

    def release_early(self, nbytes: int) -> None:
        """They were accepted, or are over."""
        self._early_bytes -= nbytes
