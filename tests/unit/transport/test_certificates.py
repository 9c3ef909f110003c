"""Certificates on disk are followed; what cannot be used changes nothing. A server follows without starting anew."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from farfill.config.secrets import TlsMaterial
from farfill.core.errors import ConfigError
from farfill.transport.certificates import CertificateWatch, ServerContext
from farfill.transport.tls import certificate_identity, client_context, http_server_context, server_context
from support.pki import Pki, make_pki


class Disk:
    """What a worker would read."""

    def __init__(self, pki: Pki) -> None:
        self.material = self.of(pki)
        self.broken = ""

    def of(self, pki: Pki) -> TlsMaterial:
        return TlsMaterial(*pki.name("decode-near").pems)

    def read(self) -> TlsMaterial:
        if self.broken:
            raise ConfigError(self.broken)
        return self.material


def watch(disk: Disk) -> tuple[CertificateWatch[TlsMaterial], list[TlsMaterial]]:
    used: list[TlsMaterial] = []

    def use(found: TlsMaterial) -> None:
        server_context(found.cert_pem, found.key_pem, found.ca_pem)
        used.append(found)

    return CertificateWatch(disk.material, disk.read, use), used


def test_unchanged_files_are_left_alone(tmp_path: Path) -> None:
    certificates, used = watch(Disk(make_pki(tmp_path)))
    assert not certificates.check()
    assert used == []


def test_new_certificate_is_taken_into_use_once(tmp_path: Path) -> None:
    disk = Disk(make_pki(tmp_path / "old"))
    certificates, used = watch(disk)
    disk.material = disk.of(make_pki(tmp_path / "new"))
    assert certificates.check()
    assert not certificates.check()
    assert used == [disk.material]


def test_half_written_files_change_nothing_and_are_tried_again(tmp_path: Path) -> None:
    disk = Disk(make_pki(tmp_path / "old"))
    certificates, used = watch(disk)
    old, new = disk.material, disk.of(make_pki(tmp_path / "new"))
    disk.material = TlsMaterial(new.cert_pem, old.key_pem, old.ca_pem)
    assert not certificates.check()
    disk.broken = "cannot be read"
    assert not certificates.check()
    assert used == []
    disk.broken, disk.material = "", new
    assert certificates.check()


async def test_files_are_looked_at_while_it_runs_and_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farfill.transport.certificates.PERIOD_S", 0.01)
    disk = Disk(make_pki(tmp_path / "old"))
    certificates, used = watch(disk)
    async with certificates.running():
        disk.material = disk.of(make_pki(tmp_path / "new"))
        async with asyncio.timeout(10):
            while not used:
                await asyncio.sleep(0.005)
    assert used == [disk.material]
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "farfill-certificates"]


@contextlib.asynccontextmanager
async def echoing(server: ServerContext) -> AsyncIterator[int]:
    """A server that answers every line with the name in the client's certificate; its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while await reader.readline():
                tls = writer.get_extra_info("ssl_object")
                writer.write(certificate_identity(tls.getpeercert()).name.encode() + b"\n")
                await writer.drain()
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server.context)
    async with listening:
        yield listening.sockets[0].getsockname()[1]


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def ask(connection: Connection) -> str:
    """One line there and back; empty when the server refused (a client of TLS 1.3 learns it only then)."""
    reader, writer = connection
    writer.write(b"?\n")
    try:
        await writer.drain()
        return (await asyncio.wait_for(reader.readline(), 10)).decode().strip()
    except (ssl.SSLError, ConnectionError):
        return ""


async def dial(port: int, pki: Pki, *, server_of: Pki) -> Connection:
    """As prefill-far of `pki`, trusting the CA of `server_of`."""
    cert, key, _ = pki.name("prefill-far", role="prefill").pems
    context = client_context(cert, key, server_of.ca.read_bytes())
    return await asyncio.open_connection("127.0.0.1", port, ssl=context)


async def test_server_follows_certificate_and_ca_while_connections_stand(tmp_path: Path) -> None:
    old, new = make_pki(tmp_path / "old"), make_pki(tmp_path / "new")
    both_cas = old.ca.read_bytes() + new.ca.read_bytes()
    server = ServerContext(http_server_context(*old.name("decode-near").pems))
    opened: list[Connection] = []
    async with echoing(server) as port:
        standing = await dial(port, old, server_of=old)
        opened.append(standing)
        assert await ask(standing) == "prefill-far"
        with pytest.raises(ssl.SSLCertVerificationError):
            await dial(port, old, server_of=new)

        cert, key, _ = old.name("decode-near").pems
        server.replace(http_server_context(cert, key, both_cas))
        for client in (old, new):
            opened.append(await dial(port, client, server_of=old))
            assert await ask(opened[-1]) == "prefill-far"

        server.replace(http_server_context(*new.name("decode-near").pems))
        opened.append(await dial(port, new, server_of=new))
        assert await ask(opened[-1]) == "prefill-far"
        opened.append(await dial(port, old, server_of=new))
        assert await ask(opened[-1]) == "", "a certificate of the old CA is refused now"
        assert await ask(standing) == "prefill-far", "what stood before lives on"
        for _, writer in opened:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
