"""The gateway against its own OpenAPI document: every answer is one the document knows, and none is a 500.

Schemathesis makes requests that fit the document and ones that do not; workers are stubs, so that all the work is the
gateway's own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from farfill.gateway.openapi import INTERNAL, PUBLIC, Operation
from support.gateway_harness import Harness, running_gateway

EXAMPLES = 30
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


class Served:
    """A gateway in a thread with a loop of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ready = threading.Event()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.harness: Harness | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="gateway-under-test")

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with running_gateway(self._folder, vision=False) as harness:
                self.harness = harness
                self._ready.set()
                await self._stop.wait()
        finally:
            self._ready.set()

    def __enter__(self) -> str:
        self._thread.start()
        assert self._ready.wait(60)
        assert self.harness is not None
        return self.harness.base

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with Served(tmp_path_factory.mktemp("openapi")) as url:
        yield url


@pytest.fixture(scope="module")
def api(base: str) -> Any:
    """The served document; models are named as they are called here, or nearly every request would end at once."""
    told = requests.get(f"{base}/openapi.json", timeout=10).json()
    for name in ("ChatBody", "CompletionBody", "TokenizeBody", "DetokenizeBody"):
        told["components"]["schemas"][name]["properties"]["model"] = {"const": "tiny"}
    waits = told["paths"]["/v1/farfill/requests/{request_id}"]["get"]["parameters"]
    next(p for p in waits if p["name"] == "wait_s")["schema"]["maximum"] = 0.01
    schema = schemathesis.openapi.from_dict(told)
    schema.config.update(base_url=base)
    return schema


def tried() -> Iterator[Any]:
    """Every operation as the document says, and otherwise where anything of it can be wrong."""
    for operation in (*PUBLIC, *INTERNAL):
        yield pytest.param(operation, GenerationMode.POSITIVE, id=f"{operation.method} {operation.template}")
        if operation.body is not None or operation.query:
            yield pytest.param(operation, GenerationMode.NEGATIVE, id=f"{operation.method} {operation.template} wrong")


@pytest.mark.parametrize(("operation", "mode"), list(tried()))
def test_no_request_makes_the_gateway_fail(api: Any, operation: Operation, mode: GenerationMode) -> None:
    cases = api[operation.template][operation.method.upper()].as_strategy(generation_mode=mode)

    statuses: set[int] = set()

    @settings(max_examples=EXAMPLES if operation.body else 5, suppress_health_check=list(HealthCheck))
    @given(case=cases, few=st.booleans(), data=st.data())
    def run(case: Any, few: bool, data: st.DataObject) -> None:
        if few and mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body = _with_few_fields(case.body, data)
        statuses.add(case.call_and_validate(checks=CHECKS).status_code)

    run()
    if operation.body is not None:
        assert (200 if mode is GenerationMode.POSITIVE else 400) in statuses, "the requests do not try what they should"


STREAMS = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "w1 w2"}]}, "chat.completion.chunk"),
    ("/v1/completions", {"prompt": "w1 w2"}, "text_completion"),
]


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}], ids=["plain", "usage"])
@pytest.mark.parametrize(("path", "body", "kind"), STREAMS, ids=[path for path, _, _ in STREAMS])
def test_each_event_of_a_stream_is_one_the_document_knows(
    api: Any, path: str, body: dict[str, Any], kind: str, options: dict[str, Any]
) -> None:
    assert {o.template for o in PUBLIC if o.event is not None} == {path for path, _, _ in STREAMS}
    call = api[path]["POST"]
    case = call.Case(body={"model": "tiny", "stream": True, **body, **options}, media_type="application/json")
    answer = case.call_and_validate(checks=CHECKS)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == ["text/event-stream; charset=utf-8"]
    assert kind in answer.text

    # The check sees what is inside an event, or it could not fail.
    other = case.call()
    other.content = other.content.replace(kind.encode(), b"other")
    with pytest.raises(FailureGroup, match="violates schema"):
        case.validate_response(other, checks=CHECKS)


def _with_few_fields(body: dict[str, Any], data: st.DataObject) -> dict[str, Any]:
    """All fields at once contradict each other nearly always; what a message may have depends on its role."""
    needed = {"model", "messages", "prompt", "tokens"}
    if "messages" in body and "prompt" in body:
        needed.remove("messages")
    others = sorted(body.keys() - needed - {"messages"})
    kept = needed | (data.draw(st.sets(st.sampled_from(others), max_size=2)) if others else set())
    few = {name: value for name, value in body.items() if name in kept}
    if "messages" in few and data.draw(st.booleans()):
        few["messages"] = [{"role": "user", "content": data.draw(st.text(max_size=20))}]
    if "tokens" not in body and "messages" not in few and few.get("prompt") is None:
        few["prompt"] = data.draw(st.text(max_size=20))
    return few
