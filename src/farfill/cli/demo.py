"""Sends one prompt through a running cluster, streaming, and fetches the gateway's record of what happened."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from farfill.core.errors import FarfillError
from farfill.gateway.records import RequestRecord

RECORD_WAIT_S = 10.0
REQUEST_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPrompt:
    """`expected` is where it should be prefilled: "remote" or "local"."""

    title: str
    text: str
    max_tokens: int
    expected: str


@dataclass(frozen=True, slots=True)
class DemoAnswer:
    """The text, and what the gateway recorded."""

    prompt: DemoPrompt
    text: str
    record: RequestRecord

    @property
    def as_placed(self) -> bool:
        """Whether it was served where it should be, without a fallback."""
        record = self.record
        return (record.outcome, record.placed, record.placement, record.fallback) == (
            "ok",
            self.prompt.expected,
            self.prompt.expected,
            "none",
        )


class DemoFailedError(FarfillError):
    """The cluster did not answer a prompt."""

    reason = "demo_failed"


async def ask(url: str, model: str, prompt: DemoPrompt, *, chat: bool) -> DemoAnswer:
    """Send `prompt` as a streaming request. Raises DemoFailedError when no whole answer comes."""
    request_id = f"up-{uuid.uuid4().hex[:12]}"
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(url, timeout=timeout) as session:
            text = "".join([piece async for piece in _stream(session, model, prompt, chat, request_id)])
            return DemoAnswer(prompt, text, await _record(session, request_id))
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, msgspec.MsgspecError) as error:
        raise DemoFailedError(f"{prompt.title}: {error or type(error).__name__}") from error


async def _stream(
    session: aiohttp.ClientSession, model: str, prompt: DemoPrompt, chat: bool, request_id: str
) -> AsyncIterator[str]:
    body: dict[str, Any] = {"model": model, "max_tokens": prompt.max_tokens, "temperature": 0, "stream": True}
    if chat:
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": prompt.text}]
    else:
        path, body["prompt"] = "/v1/completions", prompt.text
    async with session.post(path, json=body, headers={"X-Request-Id": request_id}) as response:
        if response.status != 200:
            raise DemoFailedError(f"{prompt.title}: {response.status}: {(await response.text())[:500]}")
        done = False
        # Read to the very end: leaving at [DONE] could look like a client that left early.
        async for line in response.content:
            data = line.decode().removeprefix("data: ").strip()
            if data == "[DONE]":
                done = True
            elif data:
                yield _piece(prompt, json.loads(data), chat)
    if not done:
        raise DemoFailedError(f"{prompt.title}: the stream ended early")


def _piece(prompt: DemoPrompt, event: dict[str, Any], chat: bool) -> str:
    if "error" in event:
        raise DemoFailedError(f"{prompt.title}: {event['error']}")
    if not event.get("choices"):
        return ""
    choice = event["choices"][0]
    return (choice["delta"].get("content") if chat else choice["text"]) or ""


async def _record(session: aiohttp.ClientSession, request_id: str) -> RequestRecord:
    async with session.get(f"/v1/farfill/requests/{request_id}", params={"wait_s": str(RECORD_WAIT_S)}) as response:
        body = await response.read()
        if response.status != 200:
            raise DemoFailedError(f"no record of {request_id}: {body[:500].decode(errors='replace')}")
        return msgspec.json.decode(body, type=RequestRecord)
