"""vLLM's entry point `vllm.general_plugins`: with it `--kv-transfer-config` needs the connector's name only."""

# pyright: reportMissingImports=false, reportUnknownMemberType=false

from __future__ import annotations

NAME = "FarfillConnector"


def register() -> None:
    """Called by vLLM in each of its processes, more than once in some."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "farfill.engine.vllm.connector", NAME)
