"""The codec chooser of a link: plain first, then what the measurements say, and back when they were wrong."""

from __future__ import annotations

import itertools
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farfill.core.layout import TensorKind
from farfill.kv.codec import Codec, CodecSample
from farfill.transfer.adapt import FIRST_PENALTY_S, SAMPLE_EVERY_S, CodecChooser, Stream

MIB = 1024 * 1024
ROWS = Stream(TensorKind.FULL, "bfloat16")
STATE = Stream(TensorKind.RECURRENT, "float32")
FAST_CODEC = {Codec.ZSTD: CodecSample(1.48, 900 * MIB, 1500 * MIB)}


class SimulatedLink:
    """A link with `queue` bytes always on their way. Each chunk takes the slowest of link, encoder and decoder.

    Rates are MiB/s; `coded` is what encoder and decoder together really allow. Chunks are 10 ms long on the link.
    """

    def __init__(self, chooser: CodecChooser, *, link: float, coded: float, ratio: float, queue: float = 4.0) -> None:
        self.chooser = chooser
        self.link, self.coded, self.ratio = link * MIB, coded * MIB, ratio
        self.queue = queue * MIB
        self.chunk = round(self.link / 100)
        self.now_s = 0.0
        self.stall_s = 0.0
        self.raw_bytes = 0.0
        self.codecs: list[tuple[float, Codec]] = []

    def run(self, seconds: float, stream: Stream = ROWS) -> float:
        """Busy for that long, then drained; raw bytes per second meanwhile, in MiB."""
        start_s, before = self.now_s, self.raw_bytes
        under_way: deque[tuple[int, Codec]] = deque()
        queued = 0
        while self.now_s < start_s + seconds:
            while queued < self.queue:
                codec = self.chooser.choose(stream, self.now_s)
                wire = round(self.chunk / self.ratio) if codec else self.chunk
                self.chooser.sent(wire)
                under_way.append((wire, codec))
                queued += wire
                self.codecs.append((self.now_s, codec))
            queued -= under_way[0][0]
            self._arrive(under_way.popleft())
        rate = (self.raw_bytes - before) / (self.now_s - start_s) / MIB
        for chunk in under_way:
            self._arrive(chunk)
        return rate

    def _arrive(self, chunk: tuple[int, Codec]) -> None:
        wire, codec = chunk
        self.now_s += self.stall_s + max(wire / self.link, self.chunk / self.coded if codec else 0.0)
        self.stall_s = 0.0
        self.raw_bytes += self.chunk
        self.chooser.settled(wire, self.chunk, self.now_s)

    def share(self, codec: Codec, since_s: float = 0.0) -> float:
        """Part of the chunks sent in `codec`."""
        chosen = [used for at_s, used in self.codecs if at_s >= since_s]
        return chosen.count(codec) / len(chosen)


def chooser_with(samples: dict[Codec, CodecSample], lanes: int = 2) -> CodecChooser:
    chooser = CodecChooser(lanes)
    chooser.sampled(ROWS, samples)
    return chooser


def test_first_transfer_turns_to_the_codec_within_a_fraction_of_a_second() -> None:
    """1 Gbit/s, nothing known before."""
    link = SimulatedLink(chooser_with(FAST_CODEC), link=119, coded=900, ratio=1.48)
    link.run(1.0)
    assert link.codecs[0][1] is Codec.NONE
    assert link.share(Codec.ZSTD, since_s=0.25) == 1.0


def test_later_transfers_begin_with_the_codec() -> None:
    link = SimulatedLink(chooser_with(FAST_CODEC), link=119, coded=900, ratio=1.48)
    link.run(0.5)
    link.now_s += 20.0
    again_s = link.now_s
    assert link.run(1.0) > 1.4 * 119
    assert link.share(Codec.ZSTD, since_s=again_s) == 1.0


def test_chunks_already_under_way_do_not_count_for_the_codec() -> None:
    """A long queue of plain chunks arrives at plain speed after the switch: no reason to give the codec up."""
    link = SimulatedLink(chooser_with(FAST_CODEC), link=119, coded=900, ratio=1.48, queue=40.0)
    link.run(2.0)
    assert link.share(Codec.ZSTD, since_s=0.6) == 1.0


def test_an_underestimated_fast_link_is_found_out() -> None:
    """A first transfer measured its slow start; the encoder is slower than the link really is."""
    chooser = chooser_with({Codec.ZSTD: CodecSample(1.48, 400 * MIB, 1500 * MIB)}, lanes=1)
    SimulatedLink(chooser, link=100, coded=400, ratio=1.48).run(0.3)
    fast = SimulatedLink(chooser, link=1200, coded=400, ratio=1.48, queue=60.0)
    fast.now_s = 1.0
    fast.run(3.0)
    assert fast.share(Codec.NONE, since_s=1.6) == 1.0


def test_codec_that_disappoints_is_given_up_for_a_while_and_tried_again() -> None:
    link = SimulatedLink(chooser_with(FAST_CODEC), link=100, coded=60, ratio=1.48)
    link.run(4.0)
    assert Codec.ZSTD in {codec for _, codec in link.codecs}
    assert link.share(Codec.NONE, since_s=3.0) == 1.0
    link.coded = 900 * MIB  # the cores are free again
    link.run(FIRST_PENALTY_S)
    later_s = link.now_s
    link.run(5.0)
    assert link.share(Codec.ZSTD, since_s=later_s) > 0.8


@pytest.mark.parametrize("disturbed_s", [0.5, 0.8])
def test_one_disturbed_moment_does_not_stop_a_codec_that_pays(disturbed_s: float) -> None:
    link = SimulatedLink(chooser_with(FAST_CODEC), link=100, coded=900, ratio=1.48)
    link.run(1.0)
    link.coded = 60 * MIB  # other work has the cores
    link.run(disturbed_s)
    link.coded = 900 * MIB
    link.run(1.0)  # the comparison under way may still be lost
    later_s = link.now_s
    link.run(4.0)
    assert link.share(Codec.ZSTD, since_s=later_s) > 0.7


@pytest.mark.parametrize("stall_s", [0.1, 0.2, 0.3])
def test_a_stall_of_the_link_is_not_the_codecs(stall_s: float) -> None:
    """BBR sends next to nothing for 0.2 s every ten seconds."""
    link = SimulatedLink(chooser_with(FAST_CODEC), link=100, coded=900, ratio=1.48)
    link.run(1.0)
    for _ in range(3):
        stalled_s = link.now_s
        link.stall_s = stall_s
        link.run(0.9)
        assert link.share(Codec.ZSTD, since_s=stalled_s) == 1.0
        link.run(10.0)


def test_each_failure_is_followed_by_a_longer_pause() -> None:
    link = SimulatedLink(chooser_with(FAST_CODEC), link=100, coded=60, ratio=1.48)
    link.run(400.0)
    tries = [at_s for (at_s, codec), (_, before) in itertools.pairwise(reversed(link.codecs)) if codec and not before]
    gaps = [later - earlier for earlier, later in itertools.pairwise(sorted(tries))]
    assert len(gaps) >= 2
    assert all(later > 1.5 * earlier for earlier, later in itertools.pairwise(gaps))


def test_a_link_that_got_slower_keeps_its_codec() -> None:
    link = SimulatedLink(chooser_with(FAST_CODEC), link=200, coded=900, ratio=1.48)
    link.run(1.0)
    link.link = 60 * MIB
    slower_s = link.now_s
    link.run(5.0)
    assert link.share(Codec.ZSTD, since_s=slower_s + 1.0) > 0.95


def test_streams_have_codecs_of_their_own() -> None:
    chooser = chooser_with(FAST_CODEC)
    chooser.sampled(STATE, {Codec.ZSTD: CodecSample(1.01, 900 * MIB, 1500 * MIB)})
    SimulatedLink(chooser, link=119, coded=900, ratio=1.48).run(1.0)
    assert chooser.choose(ROWS, 1.0) is Codec.ZSTD
    assert chooser.choose(STATE, 1.0) is Codec.NONE
    assert chooser.choose(Stream(TensorKind.CONV, "bfloat16"), 1.0) is Codec.NONE, "it was never sampled"


def test_samples_are_taken_once_a_period_for_each_stream() -> None:
    chooser = CodecChooser(2)
    assert chooser.wants_sample(ROWS, 0.0)
    assert chooser.wants_sample(STATE, 0.0)
    assert not chooser.wants_sample(ROWS, 1.0)
    assert chooser.wants_sample(ROWS, SAMPLE_EVERY_S)


def test_a_broken_connection_is_no_measurement() -> None:
    chooser = chooser_with(FAST_CODEC)
    for now_s in (0.0, 0.1, 5.0):  # nothing arrived for seconds
        chooser.sent(10 * MIB)
        chooser.settled(MIB, MIB, now_s)
        chooser.interrupted()
    assert chooser.choose(ROWS, 5.0) is Codec.NONE


@pytest.mark.parametrize(("encode", "bound"), [(900, True), (100, False)])
def test_the_link_is_known_to_be_the_bound_only_with_encoder_speed_to_spare(encode: int, bound: bool) -> None:
    chooser = chooser_with({Codec.ZSTD: CodecSample(1.48, encode * MIB, 1500 * MIB)})
    assert chooser.link_bound
    SimulatedLink(chooser, link=119, coded=encode * 2, ratio=1.48).run(1.0)
    assert chooser.choose(ROWS, 1.0) is Codec.ZSTD
    assert chooser.link_bound is bound


@settings(max_examples=60)
@given(
    link=st.floats(5, 2000),
    ratio=st.floats(0.9, 4),
    promised=st.floats(1, 3000),
    real=st.floats(0.33, 10),
    lanes=st.integers(1, 4),
)
def test_auto_is_never_slower_than_none_whatever_the_samples_promised(
    link: float, ratio: float, promised: float, real: float, lanes: int
) -> None:
    """Over a minute, trials included, and settled on the faster in the end. `real` is relative to the link."""
    chooser = chooser_with({Codec.ZSTD: CodecSample(ratio, promised * MIB, promised * MIB)}, lanes)
    simulated = SimulatedLink(chooser, link=link, coded=real * link, ratio=ratio, queue=link / 20)
    assert simulated.run(60.0) >= 0.95 * link
    coded = min(ratio, real)
    if simulated.share(Codec.ZSTD, since_s=50.0) > 0.5:
        assert coded >= 0.98


@settings(max_examples=30)
@given(st.floats(5, 2000), st.floats(0.9, 4), st.floats(1, 3000))
def test_the_same_measurements_give_the_same_choices(link: float, ratio: float, real: float) -> None:
    runs = []
    for _ in range(2):
        simulated = SimulatedLink(chooser_with(FAST_CODEC), link=link, coded=real, ratio=ratio)
        simulated.run(5.0)
        runs.append(simulated.codecs)
    assert runs[0] == runs[1]
