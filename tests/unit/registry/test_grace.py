"""Who is missing after an outage stays for a while."""

from __future__ import annotations

import dataclasses

from tests.unit.registry.test_service import DECODE

from farfill.registry.grace import Grace

OTHER = dataclasses.replace(DECODE, name="other")
AGAIN = dataclasses.replace(DECODE, generation="g2")


def test_without_an_outage_missing_is_gone():
    assert Grace(5.0).merge([DECODE, OTHER], [OTHER], 100.0) == (OTHER,)


def test_after_an_outage_who_is_known_stays_until_the_grace_is_over():
    grace = Grace(5.0)
    grace.outage_ended(100.0)
    assert grace.merge([OTHER, DECODE], [], 100.0) == (DECODE, OTHER)
    assert grace.merge([DECODE, OTHER], [AGAIN], 104.9) == (AGAIN, OTHER), "the new process is the one"
    assert grace.merge([DECODE, OTHER], [], 104.9, left={"other"}) == (DECODE,), "it said goodbye"
    assert (grace.left_s(104.0), grace.left_s(105.0)) == (1.0, 0.0)
    assert grace.merge([AGAIN, OTHER], [AGAIN], 105.0) == (AGAIN,)
