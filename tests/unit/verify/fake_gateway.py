"""A gateway of its own making for the verifier's tests: answers are arithmetic, faults are switched on by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from farfill.gateway.records import RequestRecord
from farfill.wire.control import StartEvent

CONTEXT_TOKENS = 512
VOCABULARY = 97


@dataclass
class FakeGateway:
    """`differ_at`: remote output changes there. `served_as`: overrides where it claims to have prefilled."""

    differ_at: int | None = None
    served_as: str | None = None
    fallback: str | None = None
    refuse: bool = False
    lossy: str | None = None
    seen: list[dict[str, Any]] = field(default_factory=list)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/v1/farfill/requests/{request_id}", self._record)
        return app

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake", "max_model_len": CONTEXT_TOKENS}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        ids = [2 + ord(char) % 50 for char in body["prompt"]]
        return web.json_response({"tokens": [1, *ids] if body["add_special_tokens"] else ids})

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not all(0 <= token < VOCABULARY for token in body["tokens"]):
            message = f"tokens: ids are from 0 to {VOCABULARY - 1}"
            return web.json_response({"error": {"message": message, "code": "invalid_request"}}, status=400)
        return web.json_response({"prompt": "x" * len(body["tokens"])})

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        forced = request.headers.get("x-farfill-force-placement", "")
        self.seen.append({**body, "forced": forced})
        if self.refuse:
            return web.json_response({"error": {"message": "no", "code": "kv_memory"}}, status=503)
        ids = [(sum(body["prompt"]) + i) % 97 for i in range(body["max_tokens"])]
        if self.differ_at is not None and forced == "remote":
            ids[self.differ_at] += 1
        headers = {
            "x-farfill-placement": self.served_as or forced,
            "x-farfill-reason": f"forced_{forced}",
            "x-request-id": f"{forced}-{len(self.seen)}",
        }
        if self.fallback is not None and forced == "remote":
            headers["x-farfill-fallback"] = self.fallback
        if self.lossy is not None and forced == "remote":
            headers["x-farfill-kv-lossy"] = self.lossy
        logprobs = {
            "tokens": [f"t{i}" for i in ids],
            "token_logprobs": [-0.5 if forced == "remote" else -0.25] * len(ids),
            "top_logprobs": [{"low": -3.0, f"t{i}": -0.5} for i in ids],
        }
        choice = {"text": "", "token_ids": ids, "logprobs": logprobs, "finish_reason": "length"}
        return web.json_response({"choices": [choice]}, headers=headers)

    async def _record(self, request: web.Request) -> web.Response:
        request_id = request.match_info["request_id"]
        remote = request_id.startswith("remote")
        record = RequestRecord(
            request_id=request_id,
            endpoint="completions",
            model="fake",
            accepted_unix_s=0.0,
            stream=False,
            ttft_s=0.75 if remote else 1.5,
            start=_start(4096 if remote else 0),
        )
        return web.Response(body=msgspec.json.encode(record), content_type="application/json")


def _start(raw_bytes: int) -> StartEvent:
    return StartEvent(
        prefilled_at="remote" if raw_bytes else "local",
        fallback="none",
        prompt_tokens=16,
        cached_tokens=0,
        received_tokens=15,
        computed_tokens=0,
        kv_wait_s=0.0,
        transfer_s=0.0,
        raw_bytes=raw_bytes,
        wire_bytes=raw_bytes // 2,
        queued_s=0.0,
        prefill_s=0.0,
        first_token_s=0.0,
    )
