"""A link of the lab as its user sees it: settings, cut and heal, counters; both directions together or each alone."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from farfill.testing.lab.errors import LabError
from farfill.testing.lab.process import Counters, RelayProcess

# A queue holds a few super-packets even where the bandwidth-delay product is tiny.
_MIN_QUEUE_BYTES = 64 * 1024
# What may be under way where the rate is not limited.
_UNLIMITED_QUEUE_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Wire:
    """One direction. The rate is that of an Ethernet line: framing (38 bytes a packet) and headers count.

    `delay_s` is one way and wanders within ± `jitter_s`, without reordering; `loss` is the share of wire packets
    lost at random; `queue_bytes` 0 means one bandwidth-delay product.
    """

    rate_bits_per_s: float = math.inf
    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    queue_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.rate_bits_per_s >= 1000:
            raise LabError(f"a rate of {self.rate_bits_per_s} bit/s is too low to be meant")
        if not 0 <= self.delay_s <= 60:
            raise LabError(f"a delay is 0 to 60 s one way, not {self.delay_s}")
        if not 0 <= self.jitter_s <= self.delay_s:
            raise LabError(f"jitter of {self.jitter_s} s is more than the delay of {self.delay_s} s it makes wander")
        if not 0 <= self.loss <= 1:
            raise LabError(f"loss is a share of 0 to 1, not {self.loss}")
        if self.queue_bytes < 0:
            raise LabError(f"a queue of {self.queue_bytes} bytes")

    @property
    def is_limited(self) -> bool:
        return math.isfinite(self.rate_bits_per_s)

    def changed(
        self,
        *,
        rate_bits_per_s: float | None,
        delay_s: float | None,
        jitter_s: float | None,
        loss: float | None,
        queue_bytes: int | None,
    ) -> Wire:
        """With the given settings; None leaves one as it is."""
        values = {
            "rate_bits_per_s": rate_bits_per_s,
            "delay_s": delay_s,
            "jitter_s": jitter_s,
            "loss": loss,
            "queue_bytes": queue_bytes,
        }
        return dataclasses.replace(self, **{name: value for name, value in values.items() if value is not None})


class Direction:
    """One way of a link. `wire` and `is_cut` say how it is now."""

    def __init__(self, link: Link, relay: RelayProcess, source: int, target: int) -> None:
        self.wire = Wire()
        self.is_cut = False
        self._link = link
        self._relay = relay
        self._ends = (source, target)

    def set(
        self,
        *,
        rate_bits_per_s: float | None = None,
        delay_s: float | None = None,
        jitter_s: float | None = None,
        loss: float | None = None,
        queue_bytes: int | None = None,
    ) -> None:
        """Changes what is given, for packets sent from now on. Raises `LabError` for what no link can be."""
        self.wire = self.wire.changed(
            rate_bits_per_s=rate_bits_per_s, delay_s=delay_s, jitter_s=jitter_s, loss=loss, queue_bytes=queue_bytes
        )
        self._link.apply()

    def cut(self) -> None:
        """Loses all packets under way and all that come, until `heal`. The sites are not told."""
        self._relay.cut(*self._ends, cut=True)
        self.is_cut = True

    def heal(self) -> None:
        self._relay.cut(*self._ends, cut=False)
        self.is_cut = False

    def counters(self) -> Counters:
        return self._relay.counters(*self._ends)

    def apply(self, rtt_s: float) -> None:
        """Hands the settings to the relay; `rtt_s`, without jitter, sizes a queue that was given no size."""
        wire = self.wire
        product = wire.rate_bits_per_s / 8 * rtt_s if wire.is_limited else _UNLIMITED_QUEUE_BYTES
        self._relay.set(
            *self._ends,
            bits_per_s=wire.rate_bits_per_s if wire.is_limited else 0,
            delay_s=wire.delay_s,
            jitter_s=wire.jitter_s,
            loss=wire.loss,
            queue=wire.queue_bytes or max(round(product), _MIN_QUEUE_BYTES),
        )


class Link:
    """Two sites and both directions between them: `forward` from the first to the second, `backward` the other."""

    def __init__(self, relay: RelayProcess, first: int, second: int) -> None:
        self.forward = Direction(self, relay, first, second)
        self.backward = Direction(self, relay, second, first)
        self.apply()

    def set(
        self,
        *,
        rate_bits_per_s: float | None = None,
        rtt_s: float | None = None,
        jitter_s: float | None = None,
        loss: float | None = None,
        queue_bytes: int | None = None,
    ) -> None:
        """Both directions alike: rate, loss and queue hold for each, `rtt_s` ± `jitter_s` for the round trip."""
        changed = [
            direction.wire.changed(
                rate_bits_per_s=rate_bits_per_s,
                delay_s=None if rtt_s is None else rtt_s / 2,
                jitter_s=None if jitter_s is None else jitter_s / 2,
                loss=loss,
                queue_bytes=queue_bytes,
            )
            for direction in (self.forward, self.backward)
        ]
        self.forward.wire, self.backward.wire = changed
        self.apply()

    def cut(self) -> None:
        """Cuts both directions."""
        self.forward.cut()
        self.backward.cut()

    def heal(self) -> None:
        self.forward.heal()
        self.backward.heal()

    def apply(self) -> None:
        """Hands both directions' settings to the relay."""
        rtt_s = self.forward.wire.delay_s + self.backward.wire.delay_s
        self.forward.apply(rtt_s)
        self.backward.apply(rtt_s)
