"""Both sides of `farfill link` on loopback: a measurement from end to end, and who may ask the near side for what."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from farfill.cli.local_ports import HOST, free_ports
from farfill.config.model import KVTransferConfig
from farfill.verify.link import (
    LAYOUT,
    MAX_TRANSFER_BYTES,
    Ends,
    LinkMeasurement,
    LinkTestError,
)
from farfill.verify.link_codecs import measure_here
from farfill.verify.link_reverse import PATH, FarSide, dial_far_side, let_in_near_side
from farfill.verify.link_serve import MAX_EXPECTED, LinkServer
from support.pki import CLUSTER, Pki, make_pki

NEAR, FAR = "decode-near", "prefill-far"
PATIENCE_S = 240.0


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return make_pki(tmp_path / "pki")


@contextlib.asynccontextmanager
async def near_side(pki: Pki) -> AsyncIterator[tuple[LinkServer, str]]:
    server = LinkServer(
        cluster=CLUSTER,
        name=NEAR,
        listen="127.0.0.1:0",
        pems=pki.name(NEAR).pems,
        config=KVTransferConfig(),
        codecs=measure_here(),
    )
    await server.start("127.0.0.1")
    runner = web.AppRunner(server.app(), access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=pki.name(NEAR).server())
        await site.start()
        host, port = runner.addresses[0][:2]
        yield server, f"{host}:{port}"
    finally:
        await runner.cleanup()
        await server.close()
    assert server.expected == 0


def measurement(pki: Pki, control: str, name: str = FAR, role: str = "prefill") -> LinkMeasurement:
    ends = Ends(
        cluster=CLUSTER, source=name, target=NEAR, control=control, pems=pki.name(name, role=role, site="far").pems
    )
    return LinkMeasurement(ends, KVTransferConfig(), seconds=0.2, connections=(1, 2), report=lambda _: None)


async def test_a_measurement_tells_everything_it_is_for(pki: Pki):
    async with near_side(pki) as (server, control):
        report = await measurement(pki, control).run()
        assert server.expected == 0
    assert [step.connections for step in report.steps] == [1, 2]
    assert all(step.bits_per_s > 1e6 for step in report.steps)
    assert report.best.connections in (1, 2)
    assert 0 < report.rtt_ms < 1000
    assert report.codecs_target.keys() == report.codecs_source.keys() == {"lz4", "zstd"}
    assert all(rates.ratio > 1 for rates in report.codecs_source.values())
    assert max(rate for _, rate in report.samples) > 0


async def test_near_side_that_dials_is_measured_all_the_same(pki: Pki, monkeypatch: pytest.MonkeyPatch):
    """Only near opens connections, control and KV alike; one measurement after the other."""
    # On a machine that is busy with other things an answer takes longer; that is not what is looked at here.
    monkeypatch.setattr("farfill.verify.link_reverse.CALL_DEADLINE_S", PATIENCE_S)
    (kv_port,) = free_ports(1)
    transfer = f"{HOST}:{kv_port}"
    config = KVTransferConfig(dial="receiver")
    near_pems, far_pems = pki.name(NEAR).pems, pki.name(FAR, role="prefill", site="far").pems
    server = LinkServer(
        cluster=CLUSTER, name=NEAR, listen=None, pems=near_pems, config=config, codecs={}
    )  # fmt: skip
    await server.start("")
    (port,) = free_ports(1)
    far = FarSide(cluster=CLUSTER, name=FAR, control=f"{HOST}:{port}", transfer=transfer)
    dialling = asyncio.create_task(dial_far_side(server, far, near_pems))
    try:
        for _ in range(2):
            ends = Ends(cluster=CLUSTER, source=FAR, target=NEAR, control="", pems=far_pems)
            measuring = LinkMeasurement(
                ends,
                config,
                seconds=0.2,
                connections=(1, 2),
                report=lambda _: None,
                near=let_in_near_side(ends, far.control, lambda _: None),
                transfer_listen=transfer,
            )
            report = await asyncio.wait_for(measuring.run(), PATIENCE_S)
            assert [step.connections for step in report.steps] == [1, 2]
            assert all(step.bits_per_s > 1e6 for step in report.steps)
            assert 0 < report.rtt_ms < 1000
    finally:
        dialling.cancel()
        await asyncio.wait([dialling])
        await server.close()
    assert server.expected == 0


async def test_only_the_expected_near_side_is_let_in(pki: Pki):
    (port,) = free_ports(1)
    control = f"{HOST}:{port}"
    far_pems = pki.name(FAR, role="prefill", site="far").pems
    ends = Ends(cluster=CLUSTER, source=FAR, target=NEAR, control="", pems=far_pems)
    entering = asyncio.create_task(let_in_near_side(ends, control, lambda _: None).__aenter__())
    connector = aiohttp.TCPConnector(ssl=pki.name("decode-other").client())
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.timeout(10):
        status = 0
        while not status:
            with contextlib.suppress(aiohttp.ClientConnectorError):
                async with session.get(f"https://{control}{PATH}") as response:
                    status = response.status
            await asyncio.sleep(0.01)
    assert status == 403
    assert not entering.done()
    entering.cancel()
    await asyncio.wait([entering])


async def test_near_side_of_another_ca_is_called_that(pki: Pki, tmp_path: Path):
    own = make_pki(tmp_path / "own")
    async with near_side(pki) as (_, control):
        with pytest.raises(LinkTestError, match=r"not valid under this cluster's CA \(tls\.ca\)") as caught:
            await measurement(own, control).run()
    assert "is farfill link serve running" not in str(caught.value)


async def test_near_side_with_another_name_is_called_that(pki: Pki):
    async with near_side(pki) as (_, control):
        ends = Ends(
            cluster=CLUSTER,
            source=FAR,
            target="decode-other",
            control=control,
            pems=pki.name(FAR, role="prefill", site="far").pems,
        )
        measuring = LinkMeasurement(ends, KVTransferConfig(), seconds=0.2, connections=(1,), report=lambda _: None)
        with pytest.raises(LinkTestError, match="answered where decode-other was expected") as caught:
            await measuring.run()
    assert "is farfill link serve running" not in str(caught.value)


async def test_a_kv_port_is_called_that_and_not_quoted(pki: Pki):
    """Its first bytes are no HTTP: nobody wants them on the terminal."""
    async with near_side(pki) as (server, _):
        with pytest.raises(LinkTestError, match="is not farfill link serve") as caught:
            await measurement(pki, server.transfer_address).run()
    assert str(caught.value).isprintable()


async def test_another_role_may_not_measure(pki: Pki):
    async with near_side(pki) as (_, control):
        with pytest.raises(LinkTestError, match="403 only prefill workers of test"):
            await measurement(pki, control, name="gateway", role="gateway").run()


async def test_transfers_are_bounded_in_size_and_number(pki: Pki):
    most = MAX_TRANSFER_BYTES // LAYOUT.bytes_per_token
    async with near_side(pki) as (server, control):
        connector = aiohttp.TCPConnector(ssl=pki.name(FAR, role="prefill", site="far").client())
        async with aiohttp.ClientSession(f"https://{control}", connector=connector) as session:

            async def status(num_tokens: int) -> int:
                async with session.post(f"/v1/link/tickets/{num_tokens}") as response:
                    return response.status

            assert [await status(count) for count in (0, most + 1)] == [400, 400]
            assert [await status(1) for _ in range(MAX_EXPECTED + 1)] == [200] * MAX_EXPECTED + [429]
        assert server.expected == MAX_EXPECTED
