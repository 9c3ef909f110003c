"""`Instance` to and from the wire, and errors as peers read them."""

from __future__ import annotations

import dataclasses

import msgspec
from aiohttp import web

from farfill.core.cluster import Instance, InstanceState, Role
from farfill.core.errors import FarfillError, ProtocolError
from farfill.wire.control import CONTENT_TYPE, ErrorBody, InstanceMessage

_encode = msgspec.msgpack.Encoder().encode


def to_message(instance: Instance) -> InstanceMessage:
    """Field by field; roles and states as their values."""
    fields = dataclasses.asdict(instance)
    return InstanceMessage(**{**fields, "role": str(instance.role), "state": str(instance.state)})


def from_message(message: InstanceMessage) -> Instance:
    """Raises ProtocolError on a role or state this version does not know."""
    fields = msgspec.structs.asdict(message)
    try:
        fields |= {"role": Role(message.role), "state": InstanceState(message.state)}
    except ValueError as error:
        raise ProtocolError(f"instance {message.name}: {error}", side="registry") from error
    return Instance(**fields)


def message_response(message: msgspec.Struct, status: int = 200) -> web.Response:
    """`message` as a msgpack answer."""
    return web.Response(body=_encode(message), status=status, content_type=CONTENT_TYPE)


def refusal(status: int, reason: str, message: str) -> web.Response:
    """An `ErrorBody` with `status`."""
    body = ErrorBody(reason=reason, message=message, retryable=status >= 500, side="registry")
    return message_response(body, status)


def encode(message: msgspec.Struct) -> bytes:
    """msgpack bytes."""
    return _encode(message)


def error_of(status: int, body: bytes) -> FarfillError:
    """The error a non-200 answer stands for."""
    try:
        told = msgspec.msgpack.decode(body, type=ErrorBody)
    except msgspec.DecodeError:
        told = ErrorBody(reason=f"http_{status}", message=f"the registry answered {status}", retryable=status >= 500)
    return FarfillError(told.message, reason=told.reason, retryable=told.retryable, side="registry")
