"""Which top-level fields a request may carry: nothing a client asks for is dropped silently.

A field is used, or harmless (accepted and without effect by its nature), or a feature that is refused unless
its value asks for nothing; everything else is unknown and refused with the nearest known name.
"""

from __future__ import annotations

import difflib
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


def decode_object(body: bytes) -> dict[str, msgspec.Raw]:
    """The top level of a JSON object. Raises InvalidRequestError for anything else."""
    try:
        return msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError as error:
        raise InvalidRequestError("the body must be a JSON object", reason="invalid_json") from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}", reason="invalid_json") from error


def check_fields(found: Mapping[str, msgspec.Raw], used: Collection[str]) -> None:
    """Raises InvalidRequestError for the first field of `found` that is unknown or asks for the impossible."""
    for name, raw in found.items():
        if name in used or name in HARMLESS:
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


def _unknown(name: str, used: Collection[str]) -> str:
    instead, hint = _ELSEWHERE.get(name, ("", ""))
    if instead in used:
        return f"{name!r} {hint}"
    # Never a refused field: that would send the client from one error to the next.
    nearest = difflib.get_close_matches(name, [*used, *HARMLESS], n=1)
    return f"unknown field {name!r}" + (f"; did you mean {nearest[0]!r}?" if nearest else "")
