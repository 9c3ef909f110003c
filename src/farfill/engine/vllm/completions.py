"""Our requests in the words of vLLM's `/v1/completions`, for servers whose endpoint for tokens alone is off.

`/inference/v1/generate` (`--enable-scale-out`) and this one take the same token ids and the same sampling; only the
names and the shape of the answers differ. Token ids come back because of `return_token_ids`, log-probabilities keyed by
token id because of `return_tokens_as_token_ids`.
"""

from __future__ import annotations

from typing import Any

_TOKEN = "token_id:"  # noqa: S105 (how vLLM writes a token id where a token's text would stand)
# vLLM makes the text, which nobody reads, in any case.
_UNKNOWN_HERE = frozenset({"detokenize"})


def to_completion(body: dict[str, Any], model: str) -> dict[str, Any]:
    """A body for `/inference/v1/generate` as one for `/v1/completions`."""
    rest = {key: value for key, value in body.items() if key not in ("token_ids", "sampling_params")}
    sampling = {key: value for key, value in body["sampling_params"].items() if key not in _UNKNOWN_HERE}
    return {
        **rest,
        **sampling,
        "model": model,
        "prompt": body["token_ids"],
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def from_completion(part: dict[str, Any]) -> dict[str, Any]:
    """An answer, or one part of a stream, as `/inference/v1/generate` would have given it."""
    if "error" in part:
        return part
    return {**part, "choices": [_choice(choice) for choice in part.get("choices") or ()]}


def _choice(choice: dict[str, Any]) -> dict[str, Any]:
    logprobs = choice.get("logprobs")
    return {**choice, "logprobs": None if logprobs is None else {"content": _content(logprobs)}}


def _content(logprobs: dict[str, Any]) -> list[dict[str, Any]]:
    alternatives = logprobs.get("top_logprobs") or [None] * len(logprobs["tokens"])
    return [
        {
            "token_id": _token_id(token),
            "logprob": logprob,
            "top_logprobs": [{"token_id": _token_id(t), "logprob": p} for t, p in (others or {}).items()],
        }
        for token, logprob, others in zip(logprobs["tokens"], logprobs["token_logprobs"], alternatives, strict=True)
    ]


def _token_id(token: str) -> int:
    return int(token.removeprefix(_TOKEN))
