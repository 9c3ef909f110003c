"""The admin API over TLS: who may look, who may change, and that every change is written down."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from farfill.clock import WallClock
from farfill.config.access import AdminConfig
from farfill.core.errors import ConfigError
from farfill.gateway.access_keys import RegistryKeys
from farfill.gateway.access_observe import SilentAccessObserver
from farfill.gateway.admin import build_admin_app
from farfill.gateway.admin_identity import AdminIdentity
from farfill.gateway.admin_parts import AdminParts
from farfill.gateway.reload import Reloaded
from farfill.registry.api_keys import KeyDigests
from farfill.registry.embedded import EmbeddedStore
from farfill.registry.key_store import RegistryKeyStore
from farfill.transport.tls import http_server_context
from support.access import PEPPER, BookOfKeys, Seen, make_access
from support.gateway_harness import Harness, running_gateway
from support.memory_disk import MemoryDisk
from support.pki import CLUSTER, Pki, make_pki


class Counting(SilentAccessObserver):
    """Keeps calls of the admin API."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def admin_called(self, action: str, outcome: str) -> None:
        self.calls.append((action, outcome))


class AdminPlace:
    """An admin API with a CA of its own, and what a client of it needs. `broken`: the cluster file has a mistake."""

    def __init__(self, pki: Pki, harness: Harness, book: BookOfKeys, seen: Counting) -> None:
        self.url, self.pki, self.harness, self.book, self.seen = "", pki, harness, book, seen
        self.broken = False

    def reload(self) -> Reloaded:
        if self.broken:
            raise ConfigError("cluster.yaml:3: gateway.listen: nonsense; write host:port")
        return Reloaded(("routing.threshold",), ("engine.device",))

    async def call(
        self, method: str, path: str, *, role: str | None = None, key: str | None = None, body: Any = None
    ) -> tuple[int, Any]:
        if role is None:
            context = ssl.create_default_context(cafile=str(self.pki.ca))
            context.check_hostname = False
        else:
            context = self.pki.name(f"a-{role}", role=role).client()
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        async with (
            aiohttp.ClientSession() as http,
            http.request(method, self.url + path, json=body, headers=headers, ssl=context) as response,
        ):
            text = await response.text()
            return response.status, await response.json() if "json" in response.content_type else text


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[AdminPlace]:
    book, seen = BookOfKeys(), Counting()
    async with (
        EmbeddedStore(MemoryDisk(), WallClock()) as store,
        running_gateway(tmp_path, store=store, door=make_access(book, Seen()), access={}) as harness,
    ):
        made = AdminPlace(make_pki(tmp_path / "pki"), harness, book, seen)
        parts = AdminParts(reload=made.reload, key_store=RegistryKeyStore(store), digests=KeyDigests(PEPPER))
        identify = AdminIdentity(AdminConfig(listen="127.0.0.1:1"), CLUSTER, harness.service.deps.access)
        runner = web.AppRunner(build_admin_app(harness.service, parts, identify, seen), access_log=None)
        await runner.setup()
        context = http_server_context(*made.pki.name("gateway", role="gateway").pems)
        context.verify_mode = ssl.CERT_OPTIONAL
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        made.url = f"https://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield made
        finally:
            await runner.cleanup()


async def test_certificate_of_an_admin_or_gateway_may_do_everything_others_may_look(place: AdminPlace) -> None:
    for role, status in (("admin", 200), ("gateway", 200), ("decode", 403)):
        assert (await place.call("GET", "/v1/farfill/instances", role=role))[0] == 200
        assert (await place.call("GET", "/metrics", role=role))[0] == 200
        assert (await place.call("POST", "/admin/reload", role=role))[0] == status
    assert place.seen.calls.count(("write", "forbidden")) == 1
    assert place.seen.calls.count(("write", "ok")) == 2


async def test_nobody_gets_in_without_credentials_of_the_admin_api(place: AdminPlace) -> None:
    api = place.book.add()
    for key in (None, api, "nonsense"):
        for method, path in (("GET", "/metrics"), ("GET", "/admin/keys"), ("POST", "/admin/keys"), ("GET", "/unknown")):
            status, body = await place.call(method, path, key=key, body={} if method == "POST" else None)
            assert status == 401, (method, path)
            assert "error" in body
    strangers = make_pki(place.pki.folder / "other").name("x", role="admin")
    stranger = strangers.client(place.pki.ca.read_bytes())
    with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
        async with aiohttp.ClientSession() as http, http.get(place.url + "/metrics", ssl=stranger) as response:
            await response.read()


async def test_admin_keys_open_it_and_monitor_keys_only_show(place: AdminPlace) -> None:
    admin, monitor = place.book.add(scope="admin", name="ops"), place.book.add(scope="monitor")
    assert (await place.call("GET", "/metrics", key=monitor))[0] == 200
    status, body = await place.call("POST", "/admin/reload", key=monitor)
    assert (status, body["error"]["type"]) == (403, "permission_error")
    assert (await place.call("POST", "/admin/reload", key=admin))[0] == 200
    audit = (await place.call("GET", "/admin/audit", key=monitor))[1]["audit"]
    assert [line["who"] for line in audit] == [f"key:{admin[3:15]} (ops)"]


async def test_key_is_made_shown_once_rotated_and_revoked(place: AdminPlace) -> None:
    wanted = {"name": "app", "tenant": "team", "models": ["tiny"], "requests_per_s": 5, "reason": "launch"}
    status, made = await place.call("POST", "/admin/keys", role="admin", body=wanted)
    assert status == 201
    assert made["key"].startswith(f"ff_{made['id']}_")
    status, listed = await place.call("GET", "/admin/keys", role="admin")
    assert [(key["id"], key["tenant"]) for key in listed["keys"]] == [(made["id"], "team")]
    assert made["key"][16:] not in str(listed)
    assert "digest" not in str(listed)
    book = RegistryKeys(place.harness.service.deps.store)  # type: ignore[arg-type]
    async with book:
        await book._mirror.wait_known()
        record = book.get(made["id"])
        assert record is not None
        assert KeyDigests(PEPPER).matches(made["key"], record, 0)
    path = f"/admin/keys/{made['id']}/rotate"
    again = (await place.call("POST", path, role="admin", body={"overlap_s": 60}))[1]
    assert again["id"] == made["id"]
    assert again["key"] != made["key"]
    assert again["former_until_unix_s"] > 0
    assert (await place.call("DELETE", f"/admin/keys/{made['id']}", role="admin"))[0] == 200
    status, body = await place.call("DELETE", f"/admin/keys/{made['id']}", role="admin")
    assert (status, body["error"]["code"]) == (404, "not_found")
    audit = (await place.call("GET", "/admin/audit", role="admin"))[1]["audit"]
    assert [(line["who"], line["why"]) for line in audit] == [
        ("certificate:near/admin/a-admin", "launch"),
        ("certificate:near/admin/a-admin", ""),
        ("certificate:near/admin/a-admin", ""),
    ]
    assert all(made["key"][16:] not in str(line) for line in audit)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tenant": "a:b"}, "tenant"),
        ({"scope": "root"}, "scope"),
        ({"models": []}, "models"),
        ({"requests_per_s": -1}, "requests_per_s"),
        ({"allow_from": ["everywhere"]}, "allow_from"),
        ({"digest": "sha256:0"}, "digest"),
        ({"models": "tiny"}, "models"),
    ],
)
async def test_key_that_makes_no_sense_is_refused_by_field(place: AdminPlace, body: Any, field: str) -> None:
    status, answer = await place.call("POST", "/admin/keys", role="admin", body=body)
    assert (status, answer["error"]["param"]) == (400, field)
    assert (await place.call("GET", "/admin/keys", role="admin"))[1]["keys"] == []


async def test_rollout_is_changed_and_reverted_with_who_did_it(place: AdminPlace) -> None:
    body = {"percent": 10, "model": "tiny", "reason": "try"}
    status, share = await place.call("PUT", "/admin/rollout", role="admin", body=body)
    assert (status, share["percent"], share["author"]) == (200, 10, "certificate:near/admin/a-admin")
    stepped = (await place.call("PUT", "/admin/rollout", role="admin", body={"model": "tiny"}))[1]
    assert (stepped["percent"], stepped["automatic"]) == (10, True)
    for bad in ({"percent": 101}, {"percent": 5, "sticky": "always"}, {"percent": "5"}):
        assert (await place.call("PUT", "/admin/rollout", role="admin", body=bad))[0] == 400
    reverted = (await place.call("POST", "/admin/rollout/revert", role="admin"))[1]["reverted"]
    assert {"model": "tiny", "tenant": "*"} in reverted


@pytest.mark.parametrize("reason", ["r" * 501, "r" * 100_000, "two\nlines", "\x1b[2J"])
async def test_reason_that_no_log_line_holds_is_refused_everywhere(place: AdminPlace, reason: str) -> None:
    made = (await place.call("POST", "/admin/keys", role="admin", body={"reason": "r" * 500}))[1]["id"]
    for method, path in (
        ("PUT", "/admin/rollout"),
        ("POST", "/admin/rollout/revert"),
        ("POST", "/admin/keys"),
        ("POST", f"/admin/keys/{made}/rotate"),
        ("DELETE", f"/admin/keys/{made}"),
    ):
        status, body = await place.call(method, path, role="admin", body={"reason": reason})
        assert (status, body["error"].get("param")) == (400, "reason"), (method, path)
    audit = (await place.call("GET", "/admin/audit", role="admin"))[1]["audit"]
    assert [line["why"] for line in audit] == ["r" * 500]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"percent": 10, "model": "nope"}, "model"),
        ({"percent": 10, "model": ""}, "model"),
        ({"percent": 10, "model": "m" * 100_000}, "model"),
        ({"model": "@prefill"}, "model"),
        ({"percent": 10, "tenant": "a b"}, "tenant"),
        ({"percent": 10, "tenant": "t" * 129}, "tenant"),
    ],
)
async def test_share_of_what_is_not_there_is_refused(place: AdminPlace, body: Any, field: str) -> None:
    status, answer = await place.call("PUT", "/admin/rollout", role="admin", body=body)
    assert (status, answer["error"]["param"]) == (400, field)
    assert len(answer["error"]["message"]) < 300
    if field == "model":
        assert "there are: tiny" in answer["error"]["message"]
    assert (await place.call("GET", "/admin/audit", role="admin"))[1]["audit"] == []


async def test_call_counts_by_what_came_of_it(place: AdminPlace) -> None:
    monitor = place.book.add(scope="monitor")
    for method, path, body, as_monitor, outcome in (
        ("GET", "/admin/keys", None, False, ("read", "ok")),
        ("POST", "/admin/keys", {}, False, ("write", "ok")),
        ("POST", "/admin/keys", {}, True, ("write", "forbidden")),
        ("POST", "/admin/keys", {"scope": "root"}, False, ("write", "failed")),
        ("POST", "/admin/keys", [], False, ("write", "failed")),
        ("DELETE", "/admin/keys/nope", None, False, ("write", "failed")),
        ("PUT", "/admin/rollout", {"percent": 101}, False, ("write", "failed")),
        ("PUT", "/admin/rollout", {"percent": 10}, False, ("write", "ok")),
        ("POST", "/admin/nothing", {}, False, ("write", "failed")),
        ("GET", "/admin/requests/nope", None, True, ("read", "failed")),
        ("GET", "/nothing", None, True, ("read", "failed")),
    ):
        await place.call(method, path, body=body, **({"key": monitor} if as_monitor else {"role": "admin"}))
        assert place.seen.calls == [outcome], (method, path)
        place.seen.calls.clear()
    place.broken = True
    await place.call("POST", "/admin/reload", role="admin")
    await place.call("GET", "/admin/keys", key="nonsense")
    assert place.seen.calls == [("write", "failed"), ("read", "unauthorised")]


async def test_salts_are_shown_to_nobody_who_may_only_look(place: AdminPlace) -> None:
    monitor, admin = place.book.add(scope="monitor"), place.book.add(scope="admin")
    for salt in ("pepper-and-salt", ""):
        await place.call("POST", "/admin/keys", role="admin", body={"salt": salt})
    for who, salts in (
        ({"key": monitor}, ["", "***"]),
        ({"role": "decode"}, ["", "***"]),
        ({"key": admin}, ["", "pepper-and-salt"]),
        ({"role": "gateway"}, ["", "pepper-and-salt"]),
    ):
        keys = (await place.call("GET", "/admin/keys", **who))[1]["keys"]
        assert sorted(key["salt"] for key in keys) == salts, who
        for path in ("/admin/audit", "/admin/config", "/metrics"):
            assert "pepper-and-salt" not in str((await place.call("GET", path, **who))[1])


async def test_reload_tells_what_applies_and_a_mistake_changes_nothing(place: AdminPlace) -> None:
    status, told = await place.call("POST", "/admin/reload", role="admin")
    assert (status, told["applied"], told["needs_restart"]) == (200, ["routing.threshold"], ["engine.device"])
    place.broken = True
    status, body = await place.call("POST", "/admin/reload", role="admin")
    assert (status, body["error"]["code"]) == (400, "config_invalid")
    assert "cluster.yaml:3" in body["error"]["message"]


async def test_gateways_and_configuration_are_shown(place: AdminPlace) -> None:
    shown = (await place.call("GET", "/admin/gateways", role="decode"))[1]
    assert shown["self"]["gateway"] == place.harness.service.name
    assert shown["others"] == []
    assert len((await place.call("GET", "/admin/config", role="decode"))[1]["version"]) == 16
