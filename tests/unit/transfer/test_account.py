"""The sender's account: every chunk that left again, why and when, in bounds."""

from __future__ import annotations

from farfill.transfer.account import MAX_RETRIES_TOLD, SentAccount
from farfill.transfer.protocol import ChunkRetry


def test_retries_are_told_one_by_one_in_bounds_and_all_are_counted():
    account = SentAccount(100.0)
    account.resent(3, "checksum", 100.5)
    account.resent(3, "connection_lost", 101.0)
    stats = account.stats()
    assert stats.retries == (ChunkRetry(3, "checksum", 0.5), ChunkRetry(3, "connection_lost", 1.0))
    for chunk in range(MAX_RETRIES_TOLD):
        account.resent(chunk, "checksum", 102.0)
    stats = account.stats()
    assert (len(stats.retries), stats.resent_chunks) == (MAX_RETRIES_TOLD, MAX_RETRIES_TOLD + 2)
