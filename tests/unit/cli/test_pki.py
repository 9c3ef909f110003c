"""Certificates made by `farfill pki init` carry the right names, fit together, and hold up in real TLS."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest
from aiohttp import web
from cryptography import x509

from farfill.cli.pki import create_pki, init, members_of
from farfill.clock import WallClock
from farfill.config.load import LoadedConfig, load_config
from farfill.config.secrets import read_ticket_public_key, read_ticket_signing_key, read_tls
from farfill.core.cluster import Instance, InstanceState, Role
from farfill.core.errors import ConfigError, TicketError
from farfill.core.ticket import Ticket
from farfill.registry.client import Announcer, InstanceWatcher
from farfill.registry.embedded import EmbeddedStore
from farfill.registry.identity import registry_context
from farfill.registry.server import RegistryService
from farfill.telemetry.metrics import RegistryMetrics
from farfill.transfer.tickets import TicketSigner, TicketVerifier
from farfill.transport.tls import parse_identity, server_context
from support.memory_disk import MemoryDisk


@pytest.fixture
def loaded(cluster_file: Path) -> LoadedConfig:
    loaded = load_config(cluster_file)
    create_pki(cluster_file.parent / "pki", members_of(loaded.config), days=1)
    return loaded


def test_certificates_name_identity_and_hosts(loaded: LoadedConfig):
    certificate = x509.load_pem_x509_certificate(read_tls(loaded, "decode-near").cert_pem)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    (uri,) = names.get_values_for_type(x509.UniformResourceIdentifier)
    identity = parse_identity(uri)
    assert (identity.cluster, identity.site, identity.role, identity.name) == (
        "farfill",
        "near",
        "decode",
        "decode-near",
    )
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]


def test_every_role_gets_material_and_keys_are_private(loaded: LoadedConfig):
    for name in ("gateway", "registry", "decode-near", "prefill-far"):
        tls = read_tls(loaded, name)
        server_context(tls.cert_pem, tls.key_pem, tls.ca_pem)
    for key in (loaded.base_dir / "pki").glob("*.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_ticket_keys_fit_together(loaded: LoadedConfig):
    clock = WallClock()
    ticket = Ticket(
        transfer_id="t", fingerprint="f", tenant="", prefill="p", decode="d", num_tokens=3,
        issued_unix_s=clock.unix_s(), expires_unix_s=clock.unix_s() + 60,
    )  # fmt: skip
    token = TicketSigner(read_ticket_signing_key(loaded)).sign(ticket)
    verifier = TicketVerifier(read_ticket_public_key(loaded), clock, 5.0)
    assert verifier.verify(token) == ticket
    with pytest.raises(TicketError):
        verifier.verify(token[:-4] + "AAAA")


def test_existing_ca_is_never_overwritten(loaded: LoadedConfig):
    before = (loaded.base_dir / "pki" / "ca.pem").read_bytes()
    with pytest.raises(ConfigError, match="holds a CA already"):
        create_pki(loaded.base_dir / "pki", members_of(loaded.config), days=1)
    assert (loaded.base_dir / "pki" / "ca.pem").read_bytes() == before


def test_default_folder_is_that_of_the_ca(cluster_file: Path, capsys: pytest.CaptureFixture[str]):
    init(config=cluster_file)
    assert (cluster_file.parent / "pki" / "prefill-far.key").exists()
    assert "Note:" not in capsys.readouterr().out


def test_folder_elsewhere_is_pointed_out(cluster_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    init(tmp_path / "other", config=cluster_file)
    assert "Note: tls.ca is file:pki/ca.pem" in capsys.readouterr().out


async def serve(loaded: LoadedConfig, name: str) -> tuple[web.AppRunner, EmbeddedStore, RegistryService, str]:
    """A registry that shows the certificate of `name`."""
    metrics = RegistryMetrics(site="near", workers=[])
    store = EmbeddedStore(MemoryDisk(), WallClock())
    await store.__aenter__()
    service = RegistryService("farfill", store, 5.0, WallClock(), metrics)
    runner = web.AppRunner(service.app(), handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    tls = read_tls(loaded, name)
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=server_context(tls.cert_pem, tls.key_pem, tls.ca_pem))
    await site.start()
    return runner, store, service, f"https://127.0.0.1:{runner.addresses[0][1]}"


def worker(name: str) -> Instance:
    return Instance(
        name=name, role=Role.DECODE, site="near", url="https://127.0.0.1:1", transfer_address="127.0.0.1:2",
        model="tiny", fingerprint="f", generation="g", state=InstanceState.READY, max_context_tokens=9,
    )  # fmt: skip


def client_tls(loaded: LoadedConfig, name: str):
    tls = read_tls(loaded, name)
    return registry_context(tls.cert_pem, tls.key_pem, tls.ca_pem, "farfill")


async def until(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


async def test_registry_believes_certificates_only(loaded: LoadedConfig):
    runner, store, service, url = await serve(loaded, "registry")
    outcomes: list[str] = []

    class Observer:
        def registry_answered(self, outcome: str) -> None:
            outcomes.append(outcome)

    try:
        watcher = InstanceWatcher(registry_url=url, ssl_context=client_tls(loaded, "gateway"))
        honest = Announcer(
            registry_url=url, ssl_context=client_tls(loaded, "decode-near"), instance=worker("decode-near")
        )
        liar = Announcer(
            registry_url=url,
            ssl_context=client_tls(loaded, "decode-near"),
            instance=worker("prefill-far"),
            observer=Observer(),
        )
        async with watcher, honest, liar:
            await until(lambda: [i.name for i in watcher.instances()] == ["decode-near"] and outcomes)
            assert set(outcomes) == {"forbidden"}
            assert not liar.registered
        assert service.members.instances() == ()
    finally:
        await runner.cleanup()
        await store.__aexit__(None, None, None)


async def test_another_role_cannot_pose_as_the_registry(loaded: LoadedConfig):
    runner, store, service, url = await serve(loaded, "prefill-far")
    outcomes: list[str] = []

    class Observer:
        def registry_answered(self, outcome: str) -> None:
            outcomes.append(outcome)

    try:
        announcer = Announcer(
            registry_url=url,
            ssl_context=client_tls(loaded, "decode-near"),
            instance=worker("decode-near"),
            observer=Observer(),
        )
        async with announcer:
            await until(lambda: bool(outcomes))
        assert set(outcomes) == {"unreachable"}
        assert service.members.instances() == ()
    finally:
        await runner.cleanup()
        await store.__aexit__(None, None, None)
