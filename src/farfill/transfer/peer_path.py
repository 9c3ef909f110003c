"""What is known of the path to one peer, and what follows from it: patience, early bytes, unsent bytes, connections.

Pure: the clock's time comes with each call.
"""

from __future__ import annotations

from farfill.topology.connections import ConnectionTuner
from farfill.topology.estimate import LinkEstimate
from farfill.transfer.last_chunks import LastChunks
from farfill.transfer.path_watch import PathChange, PathWatch
from farfill.transport.protocol import PathSample

# An acknowledgement that takes this many times what link and queue explain is overdue.
OVERDUE_FACTOR = 4.0
OVERDUE_UNKNOWN_S = 2.0
SLOW_ACCEPT_ROUND_TRIPS = 3.0
# No more leaves before ACCEPT than fills the line until it can come: it may say that much of it is held there already.
EARLY_ROUND_TRIPS = 2.0
EARLY_MIN_CHUNKS = 4
EARLY_UNKNOWN_BYTES = 4 * 1024 * 1024
# Unsent bytes of all connections together: so much of the link's rate, so that threads need not wake for every packet,
# and no more than a part of what waits, so that all connections end at about the same time.
UNSENT_S = 0.05
UNSENT_PART = 4
UNSENT_UNKNOWN_BYTES = 2 * 1024 * 1024
UNSENT_MIN_BYTES = 16 * 1024
UNSENT_MAX_BYTES = 512 * 1024


class PeerPath:
    """Not locked: the owner serialises calls. `connections`: always that many; None: as many as the path needs."""

    def __init__(self, connections: int | None) -> None:
        self._estimate = LinkEstimate()
        self._tuner = ConnectionTuner(connections)
        self._watch = PathWatch()
        self._last = LastChunks()

    # What happened

    def sent(self, now_s: float, *, at_full_rate: bool) -> None:
        """A chunk left; `at_full_rate`: nothing but the link slowed it down."""
        self._estimate.busy(now_s, at_full_rate=at_full_rate)

    def settled(self, wire_bytes: int, now_s: float, *, arrived: bool, still_busy: bool, starved: bool) -> bool:
        """A chunk is no longer on its way. Whether the rate is another one now. `starved`: no other chunk waits, and
        prefill has more to come.
        """
        if starved:
            self._estimate.starved()
        before = self._estimate.rate_bytes_per_s
        self._watch.acked(wire_bytes)
        self._estimate.acknowledged(wire_bytes if arrived else 0, now_s, still_busy=still_busy)
        return self._estimate.rate_bytes_per_s != before

    def round_trip(self, seconds: float) -> None:
        """A PING was answered."""
        self._estimate.round_trip(seconds)

    def sampled(self, connection: int, path: PathSample, now_s: float) -> None:
        """The kernel told about one connection."""
        self._watch.sampled(connection, path, now_s)
        self._last.sampled(connection, path.window_bytes_per_s)

    def chunk_taken(self, now_s: float) -> None:
        """A connection took a chunk."""
        self._last.taken(now_s)

    def disturbed(self) -> None:
        """The measurement under way tells nothing about the link."""
        self._estimate.interrupted()

    def gone(self, connection: int) -> None:
        """A connection is over."""
        self._watch.gone(connection)
        self._last.gone(connection)
        self.disturbed()

    # What follows

    @property
    def rate_bytes_per_s(self) -> float | None:
        """Goodput of the busy link, once known."""
        return self._estimate.rate_bytes_per_s

    @property
    def rtt_s(self) -> float | None:
        """The round trip, once known."""
        return self._estimate.rtt_s

    @property
    def connections(self) -> int:
        """How many to keep."""
        return self._tuner.wanted

    def patience_s(self, ahead_bytes: int) -> float:
        """How long the acknowledgement of a chunk may take that is the last of so many bytes on their way."""
        rate = self.rate_bytes_per_s
        return OVERDUE_UNKNOWN_S if rate is None else OVERDUE_FACTOR * (ahead_bytes / rate + (self.rtt_s or 0.0))

    def is_slow_accept(self, waited_s: float) -> bool:
        """Whether ACCEPT took longer than the link explains: the transfer was not expected there yet."""
        return waited_s > SLOW_ACCEPT_ROUND_TRIPS * (self.rtt_s or 0.0)

    def early_bytes(self, chunk_bytes: int) -> int:
        """How much it is useful to send before ACCEPT, in chunks of that size."""
        rate, rtt_s = self.rate_bytes_per_s, self.rtt_s
        useful = EARLY_UNKNOWN_BYTES if rate is None or rtt_s is None else EARLY_ROUND_TRIPS * rate * rtt_s
        return max(EARLY_MIN_CHUNKS * chunk_bytes, int(useful))

    def unsent_bytes(self, waiting_bytes: int, connections: int) -> int:
        """How much each of so many connections may hold that has not left, while so much waits for all of them."""
        rate = self.rate_bytes_per_s
        flowing = UNSENT_UNKNOWN_BYTES if rate is None else rate * UNSENT_S
        fair = min(flowing, waiting_bytes / UNSENT_PART) / connections
        return int(min(UNSENT_MAX_BYTES, max(UNSENT_MIN_BYTES, fair)))

    def leaves_to_others(self, connection: int, chunks_waiting: int, now_s: float) -> bool:
        """Whether this connection had better not take one of the last chunks."""
        return self._last.leaves(connection, chunks_waiting, self.rtt_s or 0.0, now_s)

    def stuck(self, connections: frozenset[int], now_s: float) -> tuple[frozenset[int], frozenset[int]]:
        """Those of them that get nothing through to speak of, and those nothing is known of."""
        rate = self.rate_bytes_per_s or 0.0
        moves = {number: self._watch.moves(number, rate, now_s) for number in connections}
        return (
            frozenset(number for number, moving in moves.items() if moving is False),
            frozenset(number for number, moving in moves.items() if moving is None),
        )

    def tune(self, now_s: float, *, busy: bool) -> PathChange | None:
        """Let the number of connections follow what the path showed since the last call; None: too early to tell."""
        path = self._watch.take(now_s)
        if path is not None:
            self._tuner.observe(
                now_s,
                congestion=path.congestion,
                rtt_s=path.rtt_s,
                acked_bytes=path.acked_bytes,
                segments_sent=path.segments_sent,
                segments_resent=path.segments_resent,
                busy=busy,
            )
        return path
