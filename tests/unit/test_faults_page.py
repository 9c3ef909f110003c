"""Every test that docs/faults.md names exists, so that the page cannot promise what nobody checks."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_named_on_the_page_exists() -> None:
    page = (ROOT / "docs" / "faults.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", page))
    assert len(named) > 40
    written: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        written.update(re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), flags=re.MULTILINE))
        written.update(re.findall(r"^    (?:async )?def (test_\w+)", path.read_text(), flags=re.MULTILINE))
    assert sorted(named - written) == []
