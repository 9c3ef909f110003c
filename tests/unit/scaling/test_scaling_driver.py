"""The slow loop's driver against a Prometheus, a webhook and an API server of its own."""

from __future__ import annotations

import hmac
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from farfill.cli.local_ports import free_ports
from farfill.core.errors import ConfigError
from farfill.policy.scaling import Group, GroupLoad, ScalingChange, ScalingReason
from farfill.scaling.file import read_autoscale, scaler_of
from farfill.scaling.loads import LoadUnknownError, PrometheusLoads
from farfill.scaling.loop import look_once
from farfill.scaling.serve import serving
from farfill.scaling.sinks import KubernetesSink, ScalingFailedError, WebhookSink
from farfill.telemetry.metrics.autoscale import AutoscaleMetrics
from farfill.telemetry.metrics.families import exposition

SECRET = b"sixteen bytes or more"
FILE = """\
prometheus: {url: "URL"}
groups:
  far/prefill: {minimum: 1, maximum: 8, deployment: far-prefill}
  near/decode: {minimum: 1, maximum: 8, deployment: near-decode, kind: statefulsets, batch: 10}
webhook: {url: "URL/hook", secret_file: hook.key}
kubernetes: {api: "URL", namespace: ff, token_file: token, ca_file: null}
schedules:
  - {group: far/prefill, start: "22:00", end: "06:00", minimum: 2, maximum: 8}
"""
CHANGE = ScalingChange(Group("near", "decode"), 2, 5, ScalingReason.BUSY, 0, 0.97)


class Site:
    """What the servers were asked, and what they are to answer."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.statuses: list[int] = []
        self.hooks: list[tuple[dict[str, str], bytes]] = []
        self.patches: list[tuple[str, dict[str, str], object]] = []
        self.pauses: list[float] = []
        self.url = ""

    async def query(self, request: web.Request) -> web.Response:
        asked = request.query["query"]
        value = next((v for part, v in self.values.items() if part in asked), None)
        if value == "error":
            return web.json_response({"status": "error", "error": "bad query"})
        result = [] if value is None else [{"metric": {}, "value": [0, value]}]
        return web.json_response({"status": "success", "data": {"result": result}})

    async def hook(self, request: web.Request) -> web.Response:
        self.hooks.append((dict(request.headers), await request.read()))
        return web.Response(status=self.statuses.pop(0) if self.statuses else 200)

    async def scale(self, request: web.Request) -> web.Response:
        self.patches.append((request.path, dict(request.headers), json.loads(await request.read())))
        return web.json_response({}, status=self.statuses.pop(0) if self.statuses else 200)

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)

    def file(self, folder: Path) -> Path:
        (folder / "hook.key").write_bytes(SECRET)
        (folder / "token").write_text("first\n")
        path = folder / "autoscale.yaml"
        path.write_text(FILE.replace("URL", self.url))
        return path


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    found = Site()
    app = web.Application()
    app.router.add_get("/api/v1/query", found.query)
    app.router.add_post("/hook", found.hook)
    app.router.add_patch("/apis/{rest:.*}", found.scale)
    async with TestServer(app) as server:
        found.url = str(server.make_url("/")).rstrip("/")
        yield found


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as found:
        yield found


async def test_load_is_read_and_a_change_is_told_to_everybody(
    site: Site, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    site.values = {
        'site="far",role="prefill",state="ready"': "2",
        "farfill_queue_tokens": "60",
        "farfill_prefill_seconds_sum": "2",
        'site="near",role="decode",state="ready"': "3",
        "farfill_running_sequences": "1.5",
    }
    file = read_autoscale(site.file(tmp_path))
    loads = PrometheusLoads(file, session)
    assert await loads.read() == {
        Group("far", "prefill"): GroupLoad(ready=2, busy=2.0, waiting_s=60.0),
        Group("near", "decode"): GroupLoad(ready=3, busy=1.5),
    }
    reported: list[tuple[ScalingChange, ...]] = []
    sinks = [WebhookSink(file.webhook, session), KubernetesSink(file, session)] if file.webhook else []
    scaler = scaler_of(file)
    assert await look_once(loads, scaler, sinks, lambda _, changes: reported.append(changes), now_s=0, unix_s=0)
    assert [(str(c.group), c.before, c.after) for c in reported[0]] == [("far/prefill", 2, 5)]
    assert json.loads(site.hooks[0][1])["changes"][0]["after"] == 5
    path, headers, body = site.patches[0]
    assert path == "/apis/apps/v1/namespaces/ff/deployments/far-prefill/scale"
    assert headers["Authorization"] == "Bearer first"
    assert headers["Content-Type"] == "application/merge-patch+json"
    assert body == {"spec": {"replicas": 5}}


async def test_a_webhook_is_signed_and_repeated_until_it_answers(
    site: Site, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    site.statuses = [503, 429, 200]
    file = read_autoscale(site.file(tmp_path))
    assert file.webhook is not None
    await WebhookSink(file.webhook, session, site.pause).tell((CHANGE,), 1000.7)
    assert site.pauses == [0.5, 1.0]
    (headers, body), *others = site.hooks
    assert [found[0]["Idempotency-Key"] for found in others] == [headers["Idempotency-Key"]] * 2
    signature = hmac.new(SECRET, b"1000." + body, "sha256").hexdigest()
    assert headers["X-Farfill-Signature"] == f"sha256={signature}"
    assert headers["X-Farfill-Timestamp"] == "1000"


async def test_a_refusal_is_not_repeated_and_the_token_is_read_anew(
    site: Site, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    file = read_autoscale(site.file(tmp_path))
    sink = KubernetesSink(file, session, site.pause)
    site.statuses = [403]
    with pytest.raises(ScalingFailedError, match="statefulsets/near-decode: HTTP 403"):
        await sink.tell((CHANGE,), 0.0)
    assert site.pauses == []
    (tmp_path / "token").write_text("second")
    site.statuses = [500] * 9
    with pytest.raises(ScalingFailedError, match="HTTP 500"):
        await sink.tell((CHANGE,), 0.0)
    assert [p[1]["Authorization"] for p in site.patches] == ["Bearer first", *["Bearer second"] * 4]


async def test_nothing_is_decided_on_half_a_picture(site: Site, session: aiohttp.ClientSession, tmp_path: Path) -> None:
    site.values = {"farfill_workers": "2", "farfill_running_sequences": "error"}
    file = read_autoscale(site.file(tmp_path))
    loads = PrometheusLoads(file, session)
    with pytest.raises(LoadUnknownError, match="bad query"):
        await loads.read()
    assert not await look_once(loads, scaler_of(file), [], lambda *_: pytest.fail("decided"), now_s=0, unix_s=0)


async def test_what_was_seen_decided_and_told_is_in_the_metrics(
    site: Site, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    site.values = {'site="far",role="prefill",state="ready"': "2", "farfill_prefill_seconds_sum": "2"}
    site.statuses = [200, 403]
    file = read_autoscale(site.file(tmp_path))
    assert file.webhook is not None
    sinks = [WebhookSink(file.webhook, session), KubernetesSink(file, session)]
    metrics, scaler, (port,) = AutoscaleMetrics(), scaler_of(file), free_ports(1)
    async with serving(f"127.0.0.1:{port}", lambda: exposition(metrics.registry)):
        for values in ({}, {"farfill_workers": "error"}):
            site.values |= values
            await look_once(
                PrometheusLoads(file, session), scaler, sinks, lambda *_: None, now_s=0, unix_s=7, observer=metrics
            )
        async with session.get(f"http://127.0.0.1:{port}/metrics") as answer:
            text = await answer.text()
        async with session.get(f"http://127.0.0.1:{port}/healthz") as answer:
            assert answer.status == 200
        with pytest.raises(ConfigError, match=r"listen: .* cannot be used"):
            async with serving(f"127.0.0.1:{port}", lambda: (b"", "")):
                pass
    for line in (
        'farfill_autoscale_looks_total{outcome="decided",service="autoscale"} 1.0',
        'farfill_autoscale_looks_total{outcome="load_unknown",service="autoscale"} 1.0',
        'farfill_autoscale_changes_total{reason="busy",role="prefill",service="autoscale",site="far"} 1.0',
        'farfill_autoscale_told_total{outcome="ok",service="autoscale",sink="webhook"} 1.0',
        'farfill_autoscale_told_total{outcome="failed",service="autoscale",sink="kubernetes"} 1.0',
        'farfill_autoscale_instances{role="prefill",service="autoscale",site="far",state="ready"} 2.0',
        'farfill_autoscale_busy_instances{role="prefill",service="autoscale",site="far"} 2.0',
        'farfill_autoscale_last_decision_timestamp_seconds{service="autoscale"} 7.0',
    ):
        assert line in text


def test_every_metric_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    for family in AutoscaleMetrics().registry.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        assert name.startswith("process_") or f"`{name}`" in page


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "minimum: 1, maximum: 8, deployment: far",
            "minimum: 9, maximum: 8, deployment: far",
            "minimum: more than max",
        ),
        ("  far/prefill: {", "  far: {", "3: groups.far: is not SITE/ROLE"),
        (", deployment: far-prefill", "", "groups.far/prefill: has no deployment"),
        ("{group: far/prefill", "{group: moon/prefill", "schedules.0.group: 'moon/prefill' is no group"),
        ('start: "22:00"', 'start: "25:00"', "schedules.0.start"),
        ("webhook:", "target: 0.9\nwebhook:", "5: target: not between"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, old: str, new: str, told: str) -> None:
    path = tmp_path / "autoscale.yaml"
    path.write_text(FILE.replace("URL", "http://x").replace(old, new))
    with pytest.raises(ConfigError, match=told):
        read_autoscale(path)
