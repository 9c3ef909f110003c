"""Which top-level fields a request may carry: nothing a client asks for is dropped silently.

A field is used, or harmless (accepted and without effect by its nature), or a feature that is refused unless
its value asks for nothing; everything else is unknown and refused with the nearest known name.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from farfill.core.errors import InvalidRequestError

HARMLESS = frozenset(
    {
        "metadata",
        "store",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "service_tier",
    }
)
"""OpenAI fields that describe the caller or how OpenAI runs its service; they never change the output."""

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
    "suffix": (None, ""),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1, 1.0),
    "prompt_logprobs": (None,),
    "truncate_prompt_tokens": (None,),
    "logits_processors": (None, []),
    "documents": (None, []),
    "chat_template": (None,),
    "continue_final_message": (None, False),
    "kv_transfer_params": (None,),
    "prompt_embeds": (None,),
    "mm_processor_kwargs": (None,),
}
"""Features of OpenAI and vLLM not offered here, with the values that ask for nothing."""


_CHAT_ONLY = ("prompt", "is for /v1/chat/completions")
_ELSEWHERE = {
    "tools": _CHAT_ONLY,
    "tool_choice": _CHAT_ONLY,
    "parallel_tool_calls": _CHAT_ONLY,
    "chat_template_kwargs": _CHAT_ONLY,
    "reasoning_effort": _CHAT_ONLY,
    "prompt": ("messages", "is for /v1/completions; chat takes 'messages'"),
    "messages": ("prompt", "is for /v1/chat/completions; completions take 'prompt'"),
}
"""Fields of the other endpoint: the field that tells the endpoint asked, and what to say there."""


MAX_HARMLESS_DEPTH = 100
MAX_NAME_CHARS = 64
_BRACKET = re.compile(rb'\\.|["\[\]{}]')
_SURROGATE = re.compile(
    rb"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<lone>\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)
"""Escaped backslashes and whole pairs are matched first, so that `lone` is what is left."""


def not_json(body: bytes, error: Exception) -> InvalidRequestError:
    """The error for a body that does not decode; the decoder's own words mislead for half a character."""
    lone = next((found["lone"] for found in _SURROGATE.finditer(body) if found["lone"]), None)
    told = str(error)
    if lone is not None and ("truncated" in told or "surrogate" in told or "escape" in told):
        told = f"a string has the lone surrogate {lone.decode('ascii')}, which is half of a character"
    return InvalidRequestError(f"the body is not valid JSON: {told}", reason="invalid_json")


def decode_object(body: bytes) -> dict[str, msgspec.Raw]:
    """The top level of a JSON object. Raises InvalidRequestError for anything else."""
    try:
        return msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError as error:
        raise InvalidRequestError("the body must be a JSON object", reason="invalid_json") from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise not_json(body, error) from error


def check_fields(found: Mapping[str, msgspec.Raw], used: Collection[str]) -> None:
    """Raises InvalidRequestError for the first field of `found` that is unknown or asks for the impossible."""
    for name, raw in found.items():
        if name in used:
            continue
        if name in HARMLESS:
            _check_depth(name, bytes(raw))
            continue
        if name not in UNSUPPORTED:
            raise InvalidRequestError(_unknown(name, used), param=name, reason="unknown_field")
        try:
            value = msgspec.json.decode(raw)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise InvalidRequestError(
                f"{name} is not valid JSON: {error}", param=name, reason="invalid_json"
            ) from error
        if value not in UNSUPPORTED[name]:
            raise InvalidRequestError(f"{name} is not supported here", param=name, reason="unsupported")


def _check_depth(name: str, raw: bytes) -> None:
    """What has no effect need not be decoded; strings may hold brackets, so only many of them are looked at."""
    if raw.count(b"[") + raw.count(b"{") <= MAX_HARMLESS_DEPTH:
        return
    depth, inside = 0, False
    for token in _BRACKET.finditer(raw):
        text = token[0]
        if text == b'"':
            inside = not inside
        elif not inside and text in b"[{":
            depth += 1
            if depth > MAX_HARMLESS_DEPTH:
                raise InvalidRequestError(f"{name} is nested more than {MAX_HARMLESS_DEPTH} levels deep", param=name)
        elif not inside and text in b"]}":
            depth -= 1


def _unknown(name: str, used: Collection[str]) -> str:
    if len(name) > MAX_NAME_CHARS:
        return f"unknown field {name[:MAX_NAME_CHARS]!r}…"
    instead, hint = _ELSEWHERE.get(name, ("", ""))
    if instead in used:
        return f"{name!r} {hint}"
    # Never a refused field: that would send the client from one error to the next.
    nearest = difflib.get_close_matches(name, [*used, *HARMLESS], n=1)
    return f"unknown field {name!r}" + (f"; did you mean {nearest[0]!r}?" if nearest else "")
