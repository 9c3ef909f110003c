"""The KV budget: bounds, owners, and the account."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from farfill.core.errors import CapacityError, InvalidRequestError
from farfill.engine.memory import KVMemory, allocate_bytes


@dataclass
class Holder:
    live: bool = True
    filled_bytes: int = 0


def test_bound_is_never_passed_and_bytes_come_back_once() -> None:
    released: list[int] = []
    memory = KVMemory(100, lambda: released.append(1))
    first, second = memory.hold(Holder(), 60), memory.hold(Holder(), 40)
    with pytest.raises(CapacityError) as refused:
        memory.hold(Holder(), 1)
    assert refused.value.reason == "kv_memory"
    first.shrink(20)
    first.release()
    first.release()
    assert memory.used_bytes == 40
    assert len(released) == 2
    second.shrink(1000)
    assert memory.used_bytes == 0
    memory.check_integrity()


def test_bytes_of_a_dead_owner_are_found() -> None:
    memory, owner = KVMemory(100), Holder()
    memory.hold(owner, 10)
    memory.check_integrity()
    owner.live = False
    with pytest.raises(AssertionError, match="10 bytes of KV are held by finished work"):
        memory.check_integrity()


def test_what_can_never_fit_is_the_clients_mistake() -> None:
    KVMemory(100).require_possible(100)
    with pytest.raises(InvalidRequestError, match="101 bytes"):
        KVMemory(100).require_possible(101)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("nbytes", [0, 1, 1 << 16, (5 << 20) + 3])
def test_buffers_are_writable_and_exact(nbytes: int, dense: bool) -> None:
    buffer = allocate_bytes(nbytes, dense=dense)
    assert buffer.nbytes == nbytes
    buffer[:] = 7
    assert not buffer.data.readonly
    assert np.all(buffer == 7)
