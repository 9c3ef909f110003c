"""What the transfer machines hear (events) and ask for (effects). Values only.

Events name what happened; effects name what a driver must do, in the order given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto

from farfill.core.cluster import FallbackReason


class Control(Enum):
    """Control frames a sender asks its driver for."""

    OPEN = auto()
    RESUME = auto()
    FINISH = auto()
    KEEPALIVE = auto()


# Events


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


@dataclass(frozen=True, slots=True)
class Failed:
    """This side gives up."""

    reason: FallbackReason
    detail: str


@dataclass(frozen=True, slots=True)
class PeerFailed:
    """The other side gave up or refused."""

    reason: FallbackReason
    detail: str


@dataclass(frozen=True, slots=True)
class LinkDown:
    """No connection to the peer is left. `silent`: none broke, nothing came over them any more."""

    detail: str = ""
    silent: bool = False


@dataclass(frozen=True, slots=True)
class LinkUp:
    """At least one connection stands."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A sign of life for this transfer (receiver: bytes or KEEPALIVE; sender: prefill works)."""


@dataclass(frozen=True, slots=True)
class ControlSent:
    """The sender's control frame left on that connection."""

    control: Control
    connection: int


@dataclass(frozen=True, slots=True)
class Accepted:
    """ACCEPT arrived: the first one fixes the cut, each one tells what the receiver holds."""

    chunk_bytes: int
    held: bytes


@dataclass(frozen=True, slots=True)
class Offered:
    """The engine produced these pieces."""

    pieces: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The engine produced everything."""


@dataclass(frozen=True, slots=True)
class Pull:
    """A connection can take a chunk; when none waits, one of a connection that is `stuck`.

    Of connections that are `unseen`, because nobody tells whether they move, only one that has had it for longer than
    its `patience_s`. `early`: the receiver granted this connection chunks before ACCEPT.
    """

    connection: int
    patience_s: float = math.inf
    early: bool = False
    stuck: frozenset[int] = frozenset()
    unseen: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Acked:
    """The receiver holds this chunk."""

    chunk: int


@dataclass(frozen=True, slots=True)
class Nacked:
    """The receiver wants this chunk again."""

    chunk: int
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """One connection broke; others may stand."""

    connection: int


@dataclass(frozen=True, slots=True)
class PeerCompleted:
    """COMPLETE arrived; `answers_open`: instead of ACCEPT, for nothing need come."""

    answers_open: bool = False


SenderEvent = (
    Tick
    | Failed
    | PeerFailed
    | LinkDown
    | LinkUp
    | Heard
    | ControlSent
    | Accepted
    | Offered
    | Finished
    | Pull
    | Acked
    | Nacked
    | ConnectionLost
    | PeerCompleted
)


@dataclass(frozen=True, slots=True)
class Opened:
    """A verified OPEN arrived, proposing this cut."""

    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """The sender asks what is held."""


@dataclass(frozen=True, slots=True)
class ChunkBegun:
    """Connection thread `claim` is about to receive this chunk."""

    chunk: int
    claim: int


@dataclass(frozen=True, slots=True)
class ChunkLanded:
    """That thread has it in place; `problem` is why it is worthless (None: verified)."""

    chunk: int
    claim: int
    problem: str | None


@dataclass(frozen=True, slots=True)
class ChunkAborted:
    """That thread's connection broke before the chunk was whole."""

    chunk: int
    claim: int


ReceiverEvent = (
    Tick | Failed | PeerFailed | LinkDown | LinkUp | Heard | Opened | Resumed | ChunkBegun | ChunkLanded | ChunkAborted
)

# Effects


@dataclass(frozen=True, slots=True)
class SendControl:
    """Send this, before any chunk."""

    control: Control


@dataclass(frozen=True, slots=True)
class SendFail:
    """Tell the other side that it is over."""

    reason: FallbackReason
    detail: str


@dataclass(frozen=True, slots=True)
class SendChunk:
    """Encode and send this chunk on the pulling connection; `early`: ACCEPT was not seen yet."""

    chunk: int
    attempt: int
    early: bool = False


@dataclass(frozen=True, slots=True)
class Resent:
    """A chunk travels again."""

    chunk: int
    reason: str


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A chunk whose acknowledgement was lost had arrived."""

    chunk: int


@dataclass(frozen=True, slots=True)
class ChunksReady:
    """Connections may pull."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The last effect. NONE: complete."""

    reason: FallbackReason
    detail: str


SenderEffect = SendControl | SendFail | SendChunk | Resent | Confirmed | ChunksReady | Ended


@dataclass(frozen=True, slots=True)
class Accept:
    """Answer with the cut in force and what is held."""

    chunk_bytes: int
    held: frozenset[int]


@dataclass(frozen=True, slots=True)
class WriteChunk:
    """The claim may write into the slot."""


@dataclass(frozen=True, slots=True)
class DropChunk:
    """The claim must discard what it receives. `acknowledge`: the chunk is held already, say so."""

    reason: str
    acknowledge: bool = False


@dataclass(frozen=True, slots=True)
class RevokeClaim:
    """A newer copy arrives: that thread must stop writing first."""

    claim: int


@dataclass(frozen=True, slots=True)
class Ack:
    """Confirm the chunk."""

    chunk: int


@dataclass(frozen=True, slots=True)
class Nack:
    """Ask for the chunk again."""

    chunk: int
    reason: str


@dataclass(frozen=True, slots=True)
class SendComplete:
    """Tell the sender that the set is whole."""


ReceiverEffect = Accept | WriteChunk | DropChunk | RevokeClaim | Ack | Nack | SendComplete | SendFail | Ended


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferLimits:
    """`timeout_s`: longest silence; `grace_s`: longest time without any connection, `open_grace_s` while the peer was
    never reached; `retry`: resends of a chunk. `rate_bytes_per_s`, measured before over `connections` (None: unknown),
    bounds how long one chunk may take that has begun to come.
    """

    timeout_s: float
    grace_s: float
    open_grace_s: float
    retry: int
    keepalive_s: float
    rate_bytes_per_s: float | None = None
    connections: int = 1
