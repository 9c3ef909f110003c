"""The embedded store's files: whenever power is lost, what was acknowledged is there, and only whole commits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farfill.core.errors import ConfigError
from farfill.registry.disk import FolderDisk
from farfill.registry.journal import DamagedError, Journal
from farfill.registry.state import Draft, KeyValueState, SavedState
from farfill.registry.store import CompactedError, Delete, LeaseLostError, Operation, Put, StoreError, Unchanged
from support.memory_disk import MemoryDisk, PowerLossError

Step = tuple[str, str, bytes, int]

steps = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "delete", "both", "grant", "revoke", "rotate"]),
        st.sampled_from("abc"),
        st.binary(max_size=12),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=14,
)


class Driver:
    """Runs steps as the embedded store does, one durable write each, and remembers what was acknowledged."""

    def __init__(self, disk: MemoryDisk) -> None:
        self.journal = Journal(disk)
        self.acknowledged: list[SavedState] = []
        self.attempted: SavedState | None = None
        self.state = self.journal.load(born=5)
        self.acknowledged.append(normal(self.state))

    def run(self, step: Step) -> None:
        kind, key, value, number = step
        if kind == "rotate":
            self.journal.rotate(self.state.saved())
            return
        draft = Draft(self.state)
        if kind == "grant":
            if self.state.lease_ttl_s(number + 1) is None:
                draft.grant(number + 1, 5.0)
        elif kind == "revoke":
            draft.revoke(number + 1)
        else:
            operations: list[Operation] = [Delete(key) if kind == "delete" else Put(key, value, number)]
            if kind == "both":
                operations.append(Put(key + "2", value))
            try:
                draft.commit(operations, [])
            except LeaseLostError:
                return
        if not draft.records:
            return
        shadow = KeyValueState.restored(self.state.saved())
        for record in draft.records:
            shadow.apply(record)
        self.attempted = normal(shadow)
        self.journal.append(draft.records)
        for record in draft.records:
            self.state.apply(record)
        self.acknowledged.append(normal(self.state))
        self.attempted = None


def normal(state: KeyValueState) -> SavedState:
    saved = state.saved()
    return SavedState(saved.born, saved.revision, sorted(saved.entries, key=lambda e: e.key), sorted(saved.leases))


def torn(fraction: float, *, zeros: bool) -> Callable[[bytes], bytes]:
    """What of a write reaches the disk: a leading part, or the right length with the rest not written."""

    def tear(data: bytes) -> bytes:
        kept = data[: int(len(data) * fraction)]
        return kept + bytes(len(data) - len(kept)) if zeros else kept

    return tear


@given(steps, st.integers(0, 40), st.sampled_from([0.0, 0.1, 0.5, 0.95, 1.0]), st.booleans())
def test_power_loss_at_any_write_loses_nothing_that_was_acknowledged(
    todo: list[Step], fuse: int, fraction: float, zeros: bool
):
    disk = MemoryDisk(fuse=fuse, tear=torn(fraction, zeros=zeros))
    driver = None
    try:
        driver = Driver(disk)
        for step in todo:
            driver.run(step)
    except PowerLossError:
        pass
    disk = disk.after_power_loss()
    again = Driver(disk)
    after = again.acknowledged[-1]
    allowed = [SavedState(5, 5, [], [])] if driver is None else [driver.acknowledged[-1]]
    if driver is not None and driver.attempted is not None:
        allowed.append(driver.attempted)
    assert after in allowed
    for step in todo:
        again.run(step)
    assert normal(Journal(disk).load(born=5)) == again.acknowledged[-1]


@given(steps, st.integers(0, 12))
def test_recovery_itself_may_lose_power(todo: list[Step], fuse: int):
    disk = MemoryDisk()
    driver = Driver(disk)
    for step in todo:
        driver.run(step)
    disk = disk.after_power_loss()
    log = next(name for name in disk.names() if name.startswith("log-"))
    disk.files[log] += b"FFj\x01 torn"
    disk.files["state-0000000000"] = b"left over"
    disk.fuse = fuse
    try:
        Journal(disk).load(born=5)
    except PowerLossError:
        disk = disk.after_power_loss()
    assert normal(Journal(disk).load(born=5)) == driver.acknowledged[-1]


@given(steps, st.data())
def test_every_cut_of_the_log_gives_a_state_that_once_was(todo: list[Step], data: st.DataObject):
    disk = MemoryDisk()
    driver = Driver(disk)
    for step in todo:
        driver.run(step)
    log = next(name for name in disk.names() if name.startswith("log-"))
    cut = data.draw(st.integers(0, len(disk.files[log])))
    disk.files[log] = disk.files[log][:cut]
    assert normal(Journal(disk).load(born=5)) in driver.acknowledged


@given(steps, st.data())
def test_a_flipped_bit_never_gives_another_state(todo: list[Step], data: st.DataObject):
    disk = MemoryDisk()
    driver = Driver(disk)
    for step in todo:
        driver.run(step)
    name = data.draw(st.sampled_from(disk.names()))
    if not disk.files[name]:
        return
    at = data.draw(st.integers(0, len(disk.files[name]) - 1))
    damaged = bytearray(disk.files[name])
    damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    disk.files[name] = bytes(damaged)
    try:
        after = normal(Journal(disk).load(born=5))
    except DamagedError:
        return
    assert name.startswith("log-")
    assert after in driver.acknowledged  # only the last frame can pass for a torn one


def filled(count: int = 5) -> MemoryDisk:
    disk = MemoryDisk()
    driver = Driver(disk)
    for i in range(count):
        driver.run(("put", "a", b"%d" % i, 0))
    return disk


def test_damage_before_the_end_is_refused_not_undone():
    disk = filled()
    log = "log-0000000001"
    damaged = bytearray(disk.files[log])
    damaged[20] ^= 1
    disk.files[log] = bytes(damaged)
    with pytest.raises(DamagedError, match="damaged at byte 0; restore"):
        Journal(disk).load(born=5)
    disk.files = {log: disk.files[log]}
    with pytest.raises(DamagedError, match="without its snapshot"):
        Journal(disk).load(born=5)


def test_full_disk_refuses_and_goes_on_when_there_is_room():
    disk = MemoryDisk()
    driver = Driver(disk)
    driver.run(("put", "a", b"1", 0))
    disk.refuse = "full"
    with pytest.raises(StoreError) as caught:
        driver.run(("put", "a", b"2", 0))
    assert (caught.value.reason, caught.value.retryable) == ("disk_refused", True)
    disk.refuse = ""
    driver.run(("put", "b", b"3", 0))
    assert normal(Journal(disk).load(born=5)) == driver.acknowledged[-1]


def test_failed_fsync_ends_all_writing():
    disk = MemoryDisk()
    driver = Driver(disk)
    disk.refuse = "sync"
    with pytest.raises(StoreError, match="the disk failed"):
        driver.run(("put", "a", b"2", 0))
    disk.refuse = ""
    with pytest.raises(StoreError, match="restart the registry"):
        driver.run(("put", "a", b"3", 0))


def test_history_is_bounded_and_says_so():
    state = KeyValueState(born=1)
    for i in range(10_050):
        draft = Draft(state)
        draft.commit([Put("a", b"%d" % i)], [])
        state.apply(draft.records[0])
    assert len(list(state.since(state.compacted))) == 10_000
    for unknown in (state.compacted - 1, state.revision + 1):
        with pytest.raises(CompactedError):
            state.since(unknown)


def test_later_steps_of_a_draft_see_earlier_ones():
    state = KeyValueState(born=1)
    draft = Draft(state)
    draft.grant(7, 5.0)
    assert draft.commit([Put("a", b"1", 7)], [Unchanged("a", 0)])
    assert not draft.commit([Put("a", b"2")], [Unchanged("a", 0)])
    assert draft.commit([Put("a", b"3", 7)], [Unchanged("a", 2)])
    assert draft.revoke(7)
    with pytest.raises(LeaseLostError):
        draft.commit([Put("b", b"", 7)], [])
    for record in draft.records:
        state.apply(record)
    assert state.scan("").entries == ()
    assert state.revision == draft.revision == 4


def test_folder_survives_and_is_locked(tmp_path: Path):
    folder = tmp_path / "deep" / "data"
    disk = FolderDisk(folder)
    journal = Journal(disk)
    state = journal.load(born=1)
    for i in itertools.islice(itertools.count(), 20):
        draft = Draft(state)
        draft.commit([Put(f"k{i}", b"v")], [])
        journal.append(draft.records)
        for record in draft.records:
            state.apply(record)
        if i == 10:
            journal.rotate(state.saved())
    with pytest.raises(ConfigError, match="in use by another registry"):
        FolderDisk(folder)
    disk.close()
    (folder / "state-0000000009.tmp").write_bytes(b"half")
    again = FolderDisk(folder)
    assert again.names() == ["log-0000000002", "state-0000000002"]
    assert normal(Journal(again).load(born=9)) == normal(state)
    assert folder.stat().st_mode & 0o077 == 0
    again.close()
    with pytest.raises(ConfigError, match="cannot be used"):
        FolderDisk(folder / "state-0000000002" / "x")
