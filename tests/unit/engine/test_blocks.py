"""The ledger of a prefix cache against a plain set, its numbers, and gaps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from farfill.engine.blocks import BlockLedger, ChangeKind

KEYS = [bytes([i]) * 16 for i in range(12)]
steps = st.lists(
    st.tuples(st.sampled_from(["stored", "removed", "cleared"]), st.lists(st.sampled_from(KEYS), max_size=6)),
    max_size=40,
)


def applied(held: set[bytes], ledger: BlockLedger, seq: int) -> tuple[set[bytes], int]:
    """A follower at `seq` with `held`, brought up to date; after a gap it starts anew."""
    changes = ledger.since(seq, 1000)
    if changes is None:
        seq, keys = ledger.snapshot()
        return set(keys), seq
    for change in changes:
        assert change.seq == seq + 1
        seq = change.seq
        if change.kind is ChangeKind.STORED:
            held |= set(change.keys)
        elif change.kind is ChangeKind.REMOVED:
            held -= set(change.keys)
        else:
            held = set()
    return held, seq


@given(steps, st.integers(1, 8), st.integers(1, 5))
def test_followers_know_what_is_held_however_often_they_look(happened, kept, every):
    ledger, model = BlockLedger(16, sparse=False, kept_changes=kept), set()
    held, seq = set(), 0
    for number, (kind, keys) in enumerate(happened):
        if kind == "stored":
            ledger.stored(keys)
            model |= set(keys)
        elif kind == "removed":
            ledger.removed(keys)
            model -= set(keys)
        else:
            ledger.cleared()
            model = set()
        assert set(ledger.snapshot()[1]) == model
        if number % every == 0:
            held, seq = applied(held, ledger, seq)
            assert held == model
    held, _ = applied(held, ledger, seq)
    assert held == model
    assert len(ledger) == len(model)


def test_nothing_new_is_no_change_and_wakes_nobody():
    ledger, woken = BlockLedger(16, sparse=False), []
    stop = ledger.follow(lambda: woken.append(ledger.seq))
    ledger.stored(KEYS[:2])
    ledger.stored(KEYS[:2])
    ledger.removed(KEYS[5:])
    assert (ledger.seq, woken) == (1, [1])
    stop()
    ledger.cleared()
    assert (ledger.seq, woken) == (2, [1])


def test_numbers_from_before_or_after_all_are_gaps():
    ledger = BlockLedger(16, sparse=False, kept_changes=2)
    assert ledger.since(0, 10) == []
    assert ledger.since(1, 10) is None
    for key in KEYS[:4]:
        ledger.stored([key])
    assert ledger.since(1, 10) is None
    assert [change.seq for change in ledger.since(2, 10) or []] == [3, 4]
    assert [change.seq for change in ledger.since(2, 1) or []] == [3]
