"""One etcd for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.etcd import EtcdServer


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    server.start()
    server.enable_auth()
    yield server
    server.kill()
