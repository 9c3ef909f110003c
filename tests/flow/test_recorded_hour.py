"""An hour of a gateway's decisions, recorded while everything changes, and made again from the log alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from farfill.policy.replay import replay
from support.recorded_hour import RecordedHour

WHOLE_LOG_BYTES = 1 << 30


@pytest.fixture(scope="module")
def hour(tmp_path_factory: pytest.TempPathFactory) -> RecordedHour:
    """Recorded without a turn of the log."""
    recorded = RecordedHour(tmp_path_factory.mktemp("hour"), seed=11, max_log_bytes=WHOLE_LOG_BYTES)
    recorded.run()
    return recorded


def test_the_hour_has_seen_everything_that_moves_a_decision(hour: RecordedHour) -> None:
    assert set(hour.decided) == {"placement", "offload", "threshold", "fallback_budget", "rollout_share"}
    wanted = {
        "above_threshold",
        "below_threshold",
        "far_cache",
        "rollout",
        "breaker_open",
        "fingerprint_mismatch",
        "link_busy",
        "fallback_tokens",
        "fallback_itl_guard",
    }
    assert wanted <= set(hour.outcomes), hour.outcomes
    assert hour.outcomes.total() > 3000


def test_a_recorded_hour_is_decided_again_identically(hour: RecordedHour) -> None:
    lines = hour.log.read_bytes().splitlines()
    assert len(lines) == hour.decided.total()
    differing = [found for found in map(replay, lines) if not found.same]
    assert differing == []


def test_the_same_hour_again_is_recorded_byte_for_byte_also_when_the_log_turns(
    hour: RecordedHour, tmp_path: Path
) -> None:
    """No decision rests on anything but what happened: no clock of the machine, no chance, no order of a set."""
    again = RecordedHour(tmp_path, seed=11, max_log_bytes=hour.log.stat().st_size * 2 // 3)
    again.run()
    former = tmp_path / "decisions.jsonl.1"
    assert former.read_bytes() + again.log.read_bytes() == hour.log.read_bytes()
    command = [sys.executable, "-m", "farfill.cli.main", "replay", str(again.log)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{hour.decided.total()} decisions" in done.stdout
    assert done.stdout.rstrip().endswith("0 differ")
