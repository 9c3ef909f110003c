"""Fixtures every test may use."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import settings

# How long an example takes says how busy the machine is.
settings.register_profile("farfill", deadline=None)
settings.load_profile("farfill")

MINIMAL_CLUSTER = """\
model:
  name: tiny
  path: model
gateway:
  site: near
registry:
  site: near
workers:
  decode-near:
    role: decode
    site: near
    listen: 127.0.0.1:7501
    transfer_listen: 127.0.0.1:7502
  prefill-far:
    role: prefill
    site: far
    listen: 127.0.0.1:7601
tls:
  ca: file:pki/ca.pem
  cert: file:pki/{name}.pem
  key: file:pki/{name}.key
tickets:
  signing_key: file:pki/ticket.key
  public_key: file:pki/ticket.pub
"""


@pytest.fixture
def cluster_file(tmp_path: Path) -> Path:
    """A valid cluster file of two sites; the files it refers to do not exist."""
    path = tmp_path / "cluster.yaml"
    path.write_text(MINIMAL_CLUSTER)
    return path


@pytest.fixture(autouse=True, scope="session")
def _logs_go_to_pytest() -> None:
    """What the code under test logs, also from its threads, is shown with a failure and not otherwise."""
    structlog.configure(logger_factory=structlog.stdlib.LoggerFactory())


@pytest.fixture(autouse=True)
def _logs_go_on_to_pytest() -> Iterator[None]:
    """Also after a test that set logging up as a process does."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    structlog.configure(logger_factory=structlog.stdlib.LoggerFactory())
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(autouse=True)
def _no_connection_crashes(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A connection that ends by a fault of ours is dialled again, and what it carried travels again: no test would see
    it."""
    yield
    crashed = [r.getMessage() for r in caplog.get_records("call") if "connection_crashed" in r.getMessage()]
    assert not crashed, crashed
