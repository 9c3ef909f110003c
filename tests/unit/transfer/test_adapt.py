"""The codec chooser of a link: plain first, then what the measurements say, and back when they were wrong."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from farfill.kv.codec import Codec, CodecSample
from farfill.transfer.adapt import SAMPLE_EVERY_S, CodecChooser

MIB = 1024 * 1024
FAST_CODEC = {Codec.ZSTD: CodecSample(1.4, 500 * MIB, 500 * MIB)}


def busy(chooser: CodecChooser, codec: Codec, rate_bytes_per_s: float, now_s: float) -> float:
    """Half a second of chunks in `codec`; the time afterwards."""
    for _ in range(5):
        chooser.sent(codec, now_s)
        now_s += 0.1
        chooser.confirmed(int(rate_bytes_per_s / 10), now_s, still_busy=True)
    return now_s


def test_chunks_travel_plain_until_the_plain_rate_is_known() -> None:
    chooser = CodecChooser(lanes=2)
    assert chooser.wants_sample(0.0)
    assert not chooser.wants_sample(1.0)
    chooser.sampled(FAST_CODEC)
    assert chooser.choose(100 * MIB) is Codec.NONE
    busy(chooser, Codec.NONE, 100 * MIB, 1.0)
    assert chooser.choose(100 * MIB) is Codec.ZSTD


def test_codec_that_disappoints_is_given_up_until_the_next_sample() -> None:
    chooser = CodecChooser(lanes=2)
    assert chooser.wants_sample(0.0)
    chooser.sampled(FAST_CODEC)
    now_s = busy(chooser, Codec.NONE, 100 * MIB, 0.0)
    assert chooser.choose(100 * MIB) is Codec.ZSTD
    now_s = busy(chooser, Codec.ZSTD, 60 * MIB, now_s)
    assert chooser.choose(100 * MIB) is Codec.NONE
    assert chooser.wants_sample(SAMPLE_EVERY_S)
    chooser.sampled(FAST_CODEC)
    busy(chooser, Codec.NONE, 100 * MIB, now_s)
    assert chooser.choose(100 * MIB) is Codec.ZSTD, "the cores may be free now"


def test_codec_that_keeps_its_promise_stays() -> None:
    chooser = CodecChooser(lanes=2)
    chooser.sampled(FAST_CODEC)
    now_s = busy(chooser, Codec.NONE, 100 * MIB, 0.0)
    busy(chooser, Codec.ZSTD, 138 * MIB, now_s)
    assert chooser.choose(100 * MIB) is Codec.ZSTD


def test_window_with_two_codecs_counts_for_neither() -> None:
    chooser = CodecChooser(lanes=2)
    chooser.sampled(FAST_CODEC)
    now_s = busy(chooser, Codec.NONE, 100 * MIB, 0.0)
    chooser.sent(Codec.NONE, now_s)
    chooser.sent(Codec.ZSTD, now_s + 0.001)
    chooser.confirmed(MIB, now_s + 0.01, still_busy=False)
    assert chooser.choose(100 * MIB) is Codec.ZSTD, "nothing was learned"


@settings(max_examples=150, deadline=None)
@given(
    link=st.floats(1, 2000),
    ratio=st.floats(0.9, 4),
    promised=st.floats(1, 3000),
    real=st.floats(1, 3000),
)
def test_auto_settles_for_what_was_faster_whatever_the_samples_promised(
    link: float, ratio: float, promised: float, real: float
) -> None:
    """MB/s of raw bytes. Plain moves `link`; the codec really moves the least of link × ratio and `real`."""
    chooser = CodecChooser(lanes=1)
    assert chooser.wants_sample(0.0)
    chooser.sampled({Codec.ZSTD: CodecSample(ratio, promised * MIB, promised * MIB)})
    rates = {Codec.NONE: link, Codec.ZSTD: min(link * ratio, real)}
    now_s, chosen = 0.0, Codec.NONE
    for _ in range(12):
        chosen = chooser.choose(link * MIB)
        now_s = busy(chooser, chosen, rates[chosen] * MIB, now_s)
    assert chooser.choose(link * MIB) is chosen, "it keeps changing its mind"
    assert rates[chosen] >= rates[Codec.NONE] * 0.999
