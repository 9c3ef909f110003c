"""What `farfill gateway --workers N` refuses before it starts anything."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from farfill.cli.gateway_processes import GatewayProcesses, reserved
from farfill.config.load import LoadedConfig
from farfill.core.errors import ConfigError


def loaded(**gateway: Any) -> LoadedConfig:
    settings = {"site": "near", "decision_log": None, "record_file": None, **gateway}
    return cast(LoadedConfig, SimpleNamespace(config=SimpleNamespace(gateway=SimpleNamespace(**settings))))


@pytest.mark.parametrize("key", ["decision_log", "record_file"])
def test_file_that_several_processes_would_write_is_refused(key: str):
    with pytest.raises(ConfigError, match=rf"gateway\.{key}.*\{{pid\}}"):
        GatewayProcesses(loaded(**{key: Path("log/decisions.jsonl")}), 2)
    GatewayProcesses(loaded(**{key: Path("log/decisions-{pid}.jsonl")}), 2)


def test_address_somebody_else_has_is_refused_and_ours_is_held():
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"cannot listen at {address}"), reserved(address):
            pass
    with reserved(address):
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", int(address.partition(":")[2])))
        shared = socket.create_server(("127.0.0.1", int(address.partition(":")[2])), reuse_port=True)
        shared.close()
