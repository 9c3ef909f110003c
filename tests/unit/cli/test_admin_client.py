"""The admin API's client where it gets no answer, or one it cannot use: what it says, and how the command ends."""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from farfill.cli import admin_client
from farfill.cli.admin_client import AdminClient
from farfill.cli.main import main
from farfill.core.errors import FarfillError, InvalidRequestError
from farfill.registry.client import RegistryCalls
from support.pki import Pki, make_pki


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    (tmp_path / "key").write_text("ff_key")
    (tmp_path / "key").chmod(0o600)
    return make_pki(tmp_path / "pki")


def client(pki: Pki, url: str, ca: str | None = None) -> AdminClient:
    return AdminClient(url, f"file:{pki.folder.parent / 'key'}", f"file:{pki.ca}" if ca is None else ca)


@asynccontextmanager
async def answering(pki: Pki, status: int, body: str) -> AsyncIterator[str]:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, text=body)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    credentials = pki.name("gateway", role="gateway")
    context.load_cert_chain(credentials.cert, credentials.key)
    server = TestServer(app, scheme="https")
    await server.start_server(ssl=context)
    try:
        yield f"https://localhost:{server.port}"  # which its certificate names
    finally:
        await server.close()


@contextmanager
def listening() -> Iterator[str]:
    """Somebody who lets in and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"https://127.0.0.1:{server.getsockname()[1]}"


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


async def refused(asked: AdminClient) -> FarfillError:
    with pytest.raises(FarfillError) as caught:
        await asyncio.to_thread(asked.call, "GET", "/admin/keys")
    assert not any(word in str(caught.value) for word in ("ssl:", "object at", "Error", "[SSL"))
    assert str(caught.value).count("\n") == 0
    return caught.value


async def test_nobody_there_is_said_in_words(pki: Pki) -> None:
    url = f"https://127.0.0.1:{closed_port()}"
    assert str(await refused(client(pki, url))) == f"{url}: cannot be reached: Connection refused"


async def test_unknown_ca_names_the_option(pki: Pki, monkeypatch: pytest.MonkeyPatch) -> None:
    other = make_pki(pki.folder.parent / "other")
    async with answering(pki, 200, "{}") as url:
        for ca in ("", f"file:{other.ca}"):
            error = await refused(client(pki, url, ca))
            assert "its certificate is not accepted: " in str(error)
            assert str(error).endswith("say with --admin-ca file:PATH which CA signed it")


async def test_silence_says_how_long(pki: Pki, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_client, "TIMEOUT_S", 0.05)
    with listening() as url:
        assert str(await refused(client(pki, url))) == f"{url}: no answer within 0.05 s"


@pytest.mark.parametrize("status", [200, 404, 500])
async def test_another_server_is_no_admin_api(pki: Pki, status: int) -> None:
    async with answering(pki, status, "<html>") as url:
        assert "is no admin API" in str(await refused(client(pki, url)))


@pytest.mark.parametrize(("status", "kind"), [(400, InvalidRequestError), (404, InvalidRequestError)])
async def test_wrong_call_is_one_here_too(pki: Pki, status: int, kind: type[FarfillError]) -> None:
    async with answering(pki, status, '{"error": {"message": "no such thing", "code": "not_found"}}') as url:
        error = await refused(client(pki, url))
        assert (type(error), str(error), error.reason) == (kind, "no such thing", "not_found")


@pytest.mark.parametrize("body", ["{}", "[]", '{"error": "text"}', "null"])
@pytest.mark.parametrize("status", [302, 403, 500])
async def test_refusal_without_a_word_tells_its_status(pki: Pki, status: int, body: str) -> None:
    async with answering(pki, status, body) as url:
        assert str(await refused(client(pki, url))) == f"{url}: answered with status {status}, and no word why"


async def test_registry_that_is_silent_or_away_is_named() -> None:
    with listening() as url:
        assert await registry_says(url) == f"registry {url}: no answer within 0.05 s"
    url = f"https://127.0.0.1:{closed_port()}"
    assert await registry_says(url, 5.0) == f"registry {url}: cannot be reached: Connection refused"


async def registry_says(url: str, timeout_s: float = 0.05) -> str:
    calls = RegistryCalls(url, ssl.create_default_context(), None)
    calls.open()
    try:
        with pytest.raises(FarfillError) as caught:
            await calls.call("GET", "/v1/instances", timeout_s=timeout_s)
        return str(caught.value)
    finally:
        await calls.close()


def test_command_ends_with_1_where_nobody_answers(pki: Pki, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    url, key = f"https://127.0.0.1:{closed_port()}", f"file:{pki.folder.parent / 'key'}"
    monkeypatch.setattr(sys, "argv", ["farfill", "keys", "list", "--admin", url, "--admin-key", key])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == f"farfill: {url}: cannot be reached: Connection refused\n"
