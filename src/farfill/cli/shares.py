"""Rollout shares as commands read and print them."""

from __future__ import annotations

import re

from farfill.cli.stores import when
from farfill.core.errors import InvalidRequestError
from farfill.registry.records import RolloutRecord
from farfill.registry.rollouts import ShareKey, version_share_of


def percent_of(text: str) -> float:
    """Raises InvalidRequestError."""
    found = re.fullmatch(r"(\d{1,3}(?:\.\d+)?)\s*%?", text.strip())
    if found is None or float(found[1]) > 100:
        raise InvalidRequestError(f"{text!r} is no share; write one from 0% to 100%, such as 10%")
    return float(found[1])


def told(key: ShareKey, record: RolloutRecord) -> str:
    """One line."""
    of_version = version_share_of(key)
    of_what = (
        f"model {key[0]}, tenant {key[1]}" if of_version is None else f"{of_version[0]} of version {of_version[1]}"
    )
    how = "automatic" if record.automatic else "by hand"
    why = f" ({record.reason})" if record.reason else ""
    return (
        f"{of_what}: {record.percent:g} % by {record.sticky}, {how}; version {record.version},"
        f" {record.author}, {when(record.unix_s)}{why}"
    )
