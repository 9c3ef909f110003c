"""Who gets in over HTTP, what they see of the models, and that no key is ever told to anybody else."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import structlog
from openai import AsyncOpenAI

from farfill.core.cluster import Role
from farfill.gateway.tokenizer import load_tokenizer
from farfill.registry.api_keys import new_key
from farfill.telemetry.logs import setup_logging
from support.access import BookOfKeys, Seen, make_access
from support.gateway_harness import Harness, running_gateway
from support.stub_worker import StubWorker, Transfers
from support.tiny_tokenizer import write_model_folder

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


class Place:
    """A gateway with two models, its keys and what it told of them."""

    def __init__(self, harness: Harness, book: BookOfKeys, seen: Seen, other: StubWorker) -> None:
        self.harness, self.book, self.seen, self.other = harness, book, seen, other

    async def post(self, key: str | None, path: str = "/v1/chat/completions", **changes: object) -> tuple[int, dict]:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        async with self.harness.http.post(self.harness.base + path, json={**BODY, **changes}, headers=headers) as r:
            return r.status, await r.json()

    async def get(self, path: str, key: str | None = None) -> tuple[int, dict]:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        async with self.harness.http.get(self.harness.base + path, headers=headers) as r:
            return r.status, await r.json()


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    book, seen = BookOfKeys(), Seen()
    other = StubWorker("decode-other", Role.DECODE, Transfers(), model="large")
    folder = write_model_folder(tmp_path / "large")
    async with running_gateway(
        tmp_path,
        door=make_access(book, seen),
        access={},
        more_models={"big": load_tokenizer(folder)},
        workers=[other],
        models={"big": {"name": "large", "path": folder, "aliases": ["huge"]}},
        model={"aliases": ["small", "default"]},
    ) as harness:
        yield Place(harness, book, seen, other)


async def test_nobody_gets_in_without_a_key_but_load_balancers_may_ask(place: Place) -> None:
    for path in ("/v1/models", "/version", "/metrics", "/v1/farfill/instances", "/unknown"):
        status, body = await place.get(path)
        assert (status, body["error"]["code"]) == (401, "missing_api_key"), path
    for path in ("/health", "/live", "/ready"):
        assert (await place.get(path))[0] == 200
    async with place.harness.http.get(place.harness.base + "/v1/models") as response:
        assert response.headers["WWW-Authenticate"] == "Bearer"
        assert response.headers["X-Request-Id"]


async def test_key_gets_in_with_its_tenant_and_salt(place: Place) -> None:
    key = place.book.add(tenant="team", salt="mine", priority=5)
    status, _ = await place.post(key, cache_salt="x", priority=1)
    assert status == 200
    command = place.harness.decode.decodes[0]
    assert (command.tenant, command.cache_salt, command.priority) == ("team", "team~mine:x", 5)


async def test_salts_of_two_keys_never_meet(place: Place) -> None:
    keys = [
        (place.book.add(tenant="a"), "b"),
        (place.book.add(tenant="a", salt="b"), ""),
        (place.book.add(tenant="a.b"), ""),
        (place.book.add(tenant="a"), None),
    ]
    for key, salt in keys:
        await place.post(key, **({} if not salt else {"cache_salt": salt}))
    salts = [command.cache_salt for command in place.harness.decode.decodes]
    assert salts == ["a:b", "a~b:", "a.b:", "a:"]


async def test_internals_are_closed_once_there_is_access(place: Place) -> None:
    key = place.book.add()
    for path in ("/metrics", "/v1/farfill/instances", "/v1/farfill/rollout", "/v1/farfill/requests/x"):
        assert (await place.get(path, key))[0] == 404


async def test_models_by_name_and_alias_go_to_their_own_pool(place: Place) -> None:
    key = place.book.add()
    for name in ("tiny", "small", "default"):
        status, body = await place.post(key, model=name)
        assert (status, body["model"]) == (200, "tiny")
    for name in ("large", "huge"):
        status, body = await place.post(key, model=name)
        assert (status, body["model"]) == (200, "large")
    assert (len(place.harness.decode.decodes), len(place.other.decodes)) == (3, 2)
    listed = (await place.get("/v1/models", key))[1]["data"]
    assert [(card["id"], card.get("aliases")) for card in listed] == [
        ("tiny", ["small", "default"]),
        ("large", ["huge"]),
    ]


async def test_foreign_model_is_answered_as_one_that_does_not_exist(place: Place) -> None:
    key = place.book.add(models=["tiny"])
    answers = []
    for name in ("large", "huge", "absent"):
        status, body = await place.post(key, model=name)
        assert status == 404
        answers.append(json.dumps(body).replace(name, "NAME"))
        assert (await place.get(f"/v1/models/{name}", key))[0] == 404
        async with place.harness.http.post(
            f"{place.harness.base}/tokenize",
            json={"model": name, "prompt": "x"},
            headers={"Authorization": f"Bearer {key}"},
        ) as response:
            assert response.status == 404
    assert len(set(answers)) == 1
    assert "large" not in answers[0]
    assert [card["id"] for card in (await place.get("/v1/models", key))[1]["data"]] == ["tiny"]
    assert place.other.decodes == []


async def test_key_may_name_models_by_alias_or_pattern(place: Place) -> None:
    assert (await place.post(place.book.add(models=["hug*"]), model="large"))[0] == 200
    none = place.book.add(models=["something-else"])
    assert (await place.get("/v1/models", none))[1]["data"] == []
    assert (await place.post(none))[0] == 404


async def test_rates_of_a_key_are_held_and_told(place: Place) -> None:
    slow = place.book.add(requests_per_s=0.001, burst_s=1)
    assert (await place.post(slow))[0] == 200
    status, body = await place.post(slow)
    assert (status, body["error"]["code"], body["error"]["type"]) == (429, "key_requests", "rate_limit_error")
    few = place.book.add(tokens_per_s=0.001, burst_s=1)
    assert (await place.post(few))[0] == 200, "a full bucket takes what is more than it holds"
    async with place.harness.http.post(
        place.harness.base + "/v1/chat/completions", json=BODY, headers={"Authorization": f"Bearer {few}"}
    ) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (429, "key_tokens")
        assert int(response.headers["Retry-After"]) >= 1
    assert (await place.post(place.book.add()))[0] == 200


async def test_openai_client_maps_refusals_to_its_exceptions(place: Place) -> None:
    async def ask(key: str, model: str = "tiny") -> None:
        async with AsyncOpenAI(base_url=f"{place.harness.base}/v1", api_key=key, max_retries=0) as client:
            await client.chat.completions.create(model=model, messages=[{"role": "user", "content": "x"}], max_tokens=1)

    with pytest.raises(openai.AuthenticationError) as wrong:
        await ask(new_key()[1])
    assert wrong.value.code == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError):
        await ask(place.book.add(scope="admin"))
    with pytest.raises(openai.PermissionDeniedError) as elsewhere:
        await ask(place.book.add(allow_from=["192.0.2.0/24"]))
    assert elsewhere.value.code == "source_not_allowed"
    with pytest.raises(openai.NotFoundError) as absent:
        await ask(place.book.add(models=["tiny"]), "large")
    assert absent.value.code == "model_not_found"
    place.book.known = False
    with pytest.raises(openai.InternalServerError) as unknown:
        await ask(place.book.add())
    assert (unknown.value.status_code, unknown.value.code) == (503, "keys_unavailable")


async def test_no_key_is_ever_in_the_log(place: Place) -> None:
    """Wherever a client puts it by mistake: the header, a wrong header, the query, the model, the id, the body."""
    stream, root = io.StringIO(), logging.getLogger()
    handlers, level = root.handlers[:], root.level
    setup_logging("debug", "json", stream=stream)
    try:
        key, wrong = place.book.add(), new_key()[1]
        base, http = place.harness.base, place.harness.http
        for text in (key, wrong):
            bearer = {"Authorization": f"Bearer {text}"}
            await place.post(text)
            await place.post(text, model=text)
            await place.post(text, unknown_field=text)
            await place.post(key, user=text, cache_salt=text)
            await place.get(f"/v1/models/{text}", key)
            await place.get(f"/{text}?api_key={text}", key)
            async with http.get(base + "/v1/models", headers={"Authorization": text, "X-Api-Key": text}):
                pass
            async with http.get(base + "/v1/models", headers={**bearer, "X-Request-Id": text[:40] + " !"}):
                pass
            async with http.post(base + "/v1/completions", data=text.encode(), headers=bearer):
                pass
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        structlog.reset_defaults()
    told = stream.getvalue()
    assert "access_refused" in told
    assert sum(json.loads(line)["event"] == "request" for line in told.splitlines()) >= 4
    for text in (key, wrong):
        assert text[16:] not in told, "the secret part"
        assert text[16:40] not in told
