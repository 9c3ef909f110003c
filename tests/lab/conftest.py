"""Labs for tests, where the machine can make one; elsewhere they are skipped with the reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from farfill.testing.lab import Lab, missing_requirement


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    in_lab = [item for item in items if item.get_closest_marker("lab")]
    if in_lab and (problem := missing_requirement()) is not None:
        for item in in_lab:
            item.add_marker(pytest.mark.skip(reason=problem))


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(seed=1) as lab:
        yield lab
