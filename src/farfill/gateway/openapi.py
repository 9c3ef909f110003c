"""GET /openapi.json: what the gateway answers, from the very types it parses and writes.

Ranges that the types do not hold are in `RANGES`; a test compares all paths with the routes of the application.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

import farfill
from farfill.gateway.errors import ErrorEnvelope
from farfill.gateway.openai.chat import ChatChunk, ChatCompletion
from farfill.gateway.openai.completions import Completion
from farfill.gateway.openai.fields import HARMLESS
from farfill.gateway.openai.requests import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"
_REFS = "#/components/schemas/{name}"
_PLACEMENT_HEADERS = (
    "x-farfill-placement",
    "x-farfill-reason",
    "x-farfill-fallback",
    "x-farfill-continued",
    "x-farfill-kv-lossy",
    "x-farfill-decode-instance",
    "x-farfill-prefill-instance",
)
_TEXTS = {
    400: "The request is wrong; `param` names the field.",
    401: "No credential, or a wrong one.",
    403: "The credential is good, but not for this, or not from there.",
    404: "There is no such thing, or it is not for this key.",
    405: "Another method.",
    413: "The body is too large.",
    429: "Too much for now; `Retry-After` says for how long.",
    500: "A fault of the gateway or of a worker.",
    503: "Nobody can serve it now; `Retry-After` says for how long.",
    504: "It took longer than gateway.request_timeout_s.",
}
_ALWAYS = (400, 401, 403, 405, 429, 503)

RANGES: Mapping[str, Mapping[str, Any]] = {
    "max_tokens": {"minimum": 1},
    "max_completion_tokens": {"minimum": 1},
    "min_tokens": {"minimum": 0},
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1},
    "min_p": {"minimum": 0, "maximum": 1},
    "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"exclusiveMinimum": 0, "maximum": 100},
    "n": {"minimum": 1, "maximum": 128},
    "priority": {"minimum": -100, "maximum": 100},
    "top_logprobs": {"minimum": 0, "maximum": 20},
    "best_of": {"minimum": 1, "maximum": 128},
    "cache_salt": {"minLength": 1, "maxLength": 256},
    "request_id": {"pattern": "^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$"},
}
WORDS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "ChatMessageBody": {"role": ("system", "developer", "user", "assistant", "tool")},
    "ContentPart": {"type": ("text", "image_url")},
    "ToolBody": {"type": ("function",)},
    "ToolCallBody": {"type": ("function",)},
    "NamedChoice": {"type": ("function",)},
    "ResponseFormat": {"type": ("text", "json_object", "json_schema")},
}
"""Fields that are text to the parser, with the words that mean something."""
_TOKEN_ID = {"type": "integer", "minimum": 0}
_TOKEN_IDS = {"type": "array", "items": _TOKEN_ID, "minItems": 1}
_PROMPT = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 128},
        _TOKEN_IDS,
        {"type": "array", "items": _TOKEN_IDS, "minItems": 1, "maxItems": 128},
    ]
}


class ModelCard(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One model."""

    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int
    aliases: list[str] = []


class ModelList(msgspec.Struct, kw_only=True):
    """All that the key may use."""

    object: str
    data: list[ModelCard]


class Tokens(msgspec.Struct, kw_only=True):
    """Answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct, kw_only=True):
    """Answer of /detokenize."""

    prompt: str


class Status(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Answer of what load balancers ask."""

    status: str
    registry: str = ""
    missing: str = ""


class Version(msgspec.Struct, kw_only=True):
    """Answer of /version."""

    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path.

    `answer` None: any JSON. `event`: what one event of a stream says. `errors` are further statuses than `_ALWAYS`.
    """

    method: str
    path: str
    summary: str
    body: type[msgspec.Struct] | None = None
    answer: type[msgspec.Struct] | None = None
    event: type[msgspec.Struct] | None = None
    media: tuple[str, ...] = (JSON,)
    errors: tuple[int, ...] = ()
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    open: bool = False
    headers: tuple[str, ...] = ()

    @property
    def template(self) -> str:
        """The path with `{name}` for what stands there."""
        return self.path.replace(":.+}", "}")


_GENERATE = {"errors": (404, 413, 500, 504), "media": (JSON, EVENTS), "headers": _PLACEMENT_HEADERS}
PUBLIC = (
    Operation(
        method="post", path="/v1/chat/completions", summary="Answer a chat, streamed or not.", body=ChatBody,
        answer=ChatCompletion, event=ChatChunk, **_GENERATE,
    ),
    Operation(
        method="post", path="/v1/completions", summary="Continue one or several prompts, streamed or not.",
        body=CompletionBody, answer=Completion, event=Completion, **_GENERATE,
    ),
    Operation(method="get", path="/v1/models", summary="Models this key may use.", answer=ModelList),
    Operation(
        method="get", path="/v1/models/{model:.+}", summary="One model, by name or alias.", answer=ModelCard,
        errors=(404,),
    ),
    Operation(
        method="post", path="/tokenize", summary="Text or messages to token ids.", body=TokenizeBody, answer=Tokens,
        errors=(404, 413, 500),
    ),
    Operation(
        method="post", path="/detokenize", summary="Token ids to text.", body=DetokenizeBody, answer=Detokenized,
        errors=(404, 413, 500),
    ),
    Operation(method="get", path="/health", summary="Whether the process answers.", answer=Status, open=True),
    Operation(method="get", path="/live", summary="The same.", answer=Status, open=True),
    Operation(
        method="get", path="/ready", summary="Whether a decode worker can take a request.", answer=Status, open=True
    ),
    Operation(method="get", path="/version", summary="Farfill's version.", answer=Version),
    Operation(method="get", path="/openapi.json", summary="This document."),
)  # fmt: skip
INTERNAL = (
    Operation(method="get", path="/metrics", summary="Prometheus text.", media=(TEXT,)),
    Operation(
        method="get", path="/v1/farfill/requests/{request_id}", summary="What happened to one of the last requests.",
        errors=(404,), query={"wait_s": {"type": "number", "minimum": 0, "maximum": 60}},
    ),
    Operation(method="get", path="/v1/farfill/instances", summary="Workers and links as this gateway sees them."),
    Operation(method="get", path="/v1/farfill/rollout", summary="Shares of requests that may prefill far."),
)  # fmt: skip


class OpenApiHandler:
    """Serves the document, made once."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._body = msgspec.json.encode(document(operations))

    def routes(self) -> list[web.RouteDef]:
        """The one."""
        return [web.get("/openapi.json", self._document)]

    async def _document(self, _: web.Request) -> web.Response:
        return web.Response(body=self._body, content_type=JSON)


def document(operations: Sequence[Operation]) -> dict[str, Any]:
    """OpenAPI 3.1."""
    types = [kind for o in operations for kind in (o.body, o.answer, o.event) if kind is not None]
    _, components = msgspec.json.schema_components([*types, ErrorEnvelope], ref_template=_REFS)
    for name, fields in WORDS.items():
        for field_name, words in fields.items() if name in components else ():
            components[name]["properties"][field_name]["enum"] = list(words)
    for kind in {o.body for o in operations if o.body is not None}:
        _tighten(components[kind.__name__])
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.template, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Farfill", "version": farfill.__version__},
        "security": [{"key": []}],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(operation: Operation) -> dict[str, Any]:
    told: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": f"{operation.method}_{operation.template.strip('/').replace('/', '_')}",
        "parameters": _parameters(operation),
        "responses": {"200": _success(operation)},
    }
    if operation.open:
        told["security"] = []
    if operation.body is not None:
        told["requestBody"] = {"required": True, "content": {JSON: {"schema": _ref(operation.body)}}}
    for status in sorted({*_ALWAYS, *operation.errors}):
        told["responses"][str(status)] = {
            "description": _TEXTS[status],
            "headers": _header("X-Request-Id"),
            "content": {JSON: {"schema": _error_of(operation, status)}},
        }
    return told


def _success(operation: Operation) -> dict[str, Any]:
    schemas: dict[str, Any] = {JSON: {} if operation.answer is None else _ref(operation.answer)}
    if operation.event is not None:
        schemas[EVENTS] = _server_sent_event(operation.event)
    return {
        "description": "Done.",
        "headers": _header("X-Request-Id") | {k: v for name in operation.headers for k, v in _header(name).items()},
        "content": {media: {"schema": schemas.get(media, {"type": "string"})} for media in operation.media},
    }


def _server_sent_event(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The schema of each event: OpenAPI 3.1 has no word for a stream, and its tools read `schema` that way."""
    said = {"anyOf": [_ref(kind), _ref(ErrorEnvelope)]}
    return {
        "description": "Each event of the stream. An error ends it; otherwise the last one is [DONE].",
        "type": "object",
        "required": ["data"],
        "properties": {
            "data": {
                "anyOf": [
                    {"const": "[DONE]"},
                    {"type": "string", "contentMediaType": JSON, "contentSchema": said},
                ]
            }
        },
    }


def _error_of(operation: Operation, status: int) -> dict[str, str]:
    not_ready = operation.path == "/ready" and status == 503 and operation.answer is not None
    return _ref(operation.answer) if not_ready and operation.answer is not None else _ref(ErrorEnvelope)


def _parameters(operation: Operation) -> list[dict[str, Any]]:
    names = [part[1:-1] for part in operation.template.split("/") if part.startswith("{")]
    found: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}} for name in names
    ]
    return found + [{"name": name, "in": "query", "schema": schema} for name, schema in operation.query.items()]


def _header(name: str) -> dict[str, Any]:
    return {name: {"schema": {"type": "string"}}}


def _ref(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": _REFS.format(name=kind.__name__)}


def _tighten(schema: dict[str, Any]) -> None:
    """What `check_fields` and the checks of ranges add to a body's types."""
    properties = schema["properties"]
    for name, limits in RANGES.items():
        if name in properties:
            for branch in properties[name].get("anyOf", [properties[name]]):
                if branch.get("type") != "null":
                    branch.update(limits)
    if "prompt" in properties and "echo" in properties:
        properties["prompt"] = _PROMPT
    if "messages" in properties:
        _bound_array(properties["messages"])
    properties |= {name: {} for name in sorted(HARMLESS)} if "stream" in properties else {}
    schema["additionalProperties"] = False
    if "stream" in properties:
        schema["required"] = sorted({*schema.get("required", []), "model"})


def _bound_array(schema: dict[str, Any]) -> None:
    for branch in schema.get("anyOf", [schema]):
        if branch.get("type") == "array":
            branch["minItems"] = 1
