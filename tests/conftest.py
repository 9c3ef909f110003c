"""Fixtures every test may use."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog

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
