"""The log that is written beside the event loop: it never makes anybody wait, and tells what it lost."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from farfill.gateway.line_log import MAX_WAITING, LineLog

DEADLINE_S = 10.0


@dataclass(frozen=True)
class Number:
    value: int

    def line(self) -> bytes:
        return b"%d" % self.value


def test_log_that_cannot_keep_up_drops_and_counts_and_never_waits(tmp_path: Path) -> None:
    dropped: list[int] = []
    log: LineLog[Number] = LineLog(tmp_path / "log", 1 << 30, dropped.append)
    batches = MAX_WAITING // 100 + 2
    for batch in range(batches):  # nobody writes yet
        log.add([Number(100 * batch + i) for i in range(100)])
    assert sum(dropped) == 100 * batches - MAX_WAITING
    log.start()
    log.close()
    assert (tmp_path / "log").read_bytes().splitlines() == [b"%d" % i for i in range(MAX_WAITING)]


def test_disk_that_fails_costs_lines_and_is_used_again_when_it_is_back(tmp_path: Path) -> None:
    folder, dropped = tmp_path / "disk", []
    log: LineLog[Number] = LineLog(folder / "log", 1 << 30, dropped.append)
    log.start()
    shutil.rmtree(folder)
    log.add([Number(1)])
    end_s = time.monotonic() + DEADLINE_S
    while not dropped and time.monotonic() < end_s:
        time.sleep(0.005)
    folder.mkdir()
    log.add([Number(2)])
    log.close()
    assert dropped == [1]
    assert (folder / "log").read_bytes() == b"2\n"


def test_line_that_a_killed_process_left_half_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for left, wanted in ((b"1\n2", b"1\n7\n"), (b"1\n2\n", b"1\n2\n7\n"), (b"12", b"7\n"), (b"", b"7\n")):
        path.write_bytes(left)
        log: LineLog[Number] = LineLog(path, 1 << 30, lambda _: None)
        log.start()
        log.add([Number(7)])
        log.close()
        assert path.read_bytes() == wanted
