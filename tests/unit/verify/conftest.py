"""A fake gateway on a real port, and the verifier's client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp.test_utils import TestServer
from tests.unit.verify.fake_gateway import FakeGateway

from farfill.verify.client import GatewayClient, gateway_client


@pytest.fixture
def gateway() -> FakeGateway:
    return FakeGateway()


@pytest.fixture
async def client(gateway: FakeGateway) -> AsyncIterator[GatewayClient]:
    async with TestServer(gateway.app()) as server, gateway_client(str(server.make_url("/"))) as client:
        yield client
