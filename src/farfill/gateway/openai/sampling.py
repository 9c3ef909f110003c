"""Sampling fields of a request, checked and turned into `core.sampling.SamplingParams`."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

from farfill.core.errors import InvalidRequestError
from farfill.core.sampling import SamplingParams
from farfill.gateway.openai.requests import ChatBody, CompletionBody, SamplingFields

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
COMPLETION_MAX_TOKENS = 16
_DEFAULTS = SamplingParams()
MAX_CHECKED = 1024
MAX_ID_DIGITS = 20
_given = attrgetter(
    "min_tokens",
    "stop_token_ids",
    "allowed_token_ids",
    "spaces_between_special_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "include_stop_str_in_output",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "n",
    "ignore_eos",
    "skip_special_tokens",
)
"""All that `_check` looks at."""
_checked: dict[object, SamplingParams] = {}


def chat_sampling(body: ChatBody, vocab_size: int) -> tuple[SamplingParams, int | None]:
    """Sampling parameters and the demanded max_tokens (None: the rest of the context)."""
    limit = _demanded_tokens(body)
    top = body.top_logprobs
    if top is not None and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    if top is not None:
        _within("top_logprobs", top, 0, MAX_LOGPROBS)
    return _common(body, vocab_size, limit, (top or 0) if body.logprobs else None), limit


def completion_sampling(body: CompletionBody, vocab_size: int) -> tuple[SamplingParams, int | None]:
    """Sampling parameters and the demanded max_tokens (16 when absent, as in OpenAI's API)."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequestError("best_of other than n is not supported here", param="best_of", reason="unsupported")
    if body.logprobs is not None:
        _within("logprobs", body.logprobs, 0, MAX_LOGPROBS)
        if body.echo:
            raise InvalidRequestError(
                "echo together with logprobs needs log-probabilities of the prompt, which are not supported here",
                param="logprobs",
                reason="unsupported",
            )
    demanded = _demanded_tokens(body)
    limit = COMPLETION_MAX_TOKENS if demanded is None else demanded
    return _common(body, vocab_size, limit, body.logprobs), demanded


def with_max_tokens(sampling: SamplingParams, max_tokens: int) -> SamplingParams:
    """`sampling` with the final length limit."""
    if sampling.max_tokens == max_tokens >= sampling.min_tokens:
        return sampling
    return replace(sampling, max_tokens=max_tokens, min_tokens=min(sampling.min_tokens, max_tokens))


def check_bad_words(words: list[str]) -> list[str]:
    """Raises InvalidRequestError when they are too many, too long, or blank."""
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequestError(f"bad_words has {len(words)} entries, at most {MAX_BAD_WORDS}", param="bad_words")
    for word in words:
        if not word.strip() or len(word) > MAX_BAD_WORD_CHARS:
            raise InvalidRequestError(
                f"bad_words have 1 to {MAX_BAD_WORD_CHARS} characters and are not blank", param="bad_words"
            )
    return words


def check_token_ids(param: str, token_ids: list[int], vocab_size: int) -> None:
    """Raises InvalidRequestError unless every id is in the vocabulary."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        bad = next(t for t in token_ids if not 0 <= t < vocab_size)
        raise InvalidRequestError(f"{param}: token id {bad} is not in [0, {vocab_size})", param=param)


def _demanded_tokens(body: SamplingFields) -> int | None:
    """The length limit under either of its names."""
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new not in (None, old):
        raise InvalidRequestError(
            "max_tokens and max_completion_tokens differ; give one of them", param="max_completion_tokens"
        )
    for name, value in (("max_tokens", old), ("max_completion_tokens", new)):
        if value is not None:
            _at_least(name, value, 1)
    return new if old is None else old


def _common(body: SamplingFields, vocab_size: int, limit: int | None, logprobs: int | None) -> SamplingParams:
    """Clients mostly ask for the same again: what was checked once need not be checked again."""
    given = _given(body)
    try:
        found = _checked.get((given, vocab_size, limit, logprobs))
    except TypeError:  # lists and dictionaries among them
        return _check(body, vocab_size, limit, logprobs)
    if found is None:
        found = _check(body, vocab_size, limit, logprobs)
        if body.seed is None:  # others seldom come again
            if len(_checked) >= MAX_CHECKED:
                _checked.clear()
            _checked[given, vocab_size, limit, logprobs] = found
    return found


def _check(body: SamplingFields, vocab_size: int, limit: int | None, logprobs: int | None) -> SamplingParams:
    _check_ranges(body)
    min_tokens = body.min_tokens or 0
    _at_least("min_tokens", min_tokens, 0)
    if limit is not None and min_tokens > limit:
        raise InvalidRequestError(f"min_tokens {min_tokens} is over max_tokens {limit}", param="min_tokens")
    stop_token_ids = body.stop_token_ids or []
    check_token_ids("stop_token_ids", stop_token_ids, vocab_size)
    allowed_token_ids = body.allowed_token_ids or []
    check_token_ids("allowed_token_ids", allowed_token_ids, vocab_size)
    if body.allowed_token_ids == []:
        raise InvalidRequestError("allowed_token_ids is empty: no output is possible", param="allowed_token_ids")
    if body.spaces_between_special_tokens is False:
        raise InvalidRequestError(
            "spaces_between_special_tokens: false is not supported here",
            param="spaces_between_special_tokens",
            reason="unsupported",
        )

    return SamplingParams(
        max_tokens=_DEFAULTS.max_tokens if limit is None else limit,
        min_tokens=min_tokens,
        temperature=_DEFAULTS.temperature if body.temperature is None else body.temperature,
        top_p=_DEFAULTS.top_p if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        min_p=_DEFAULTS.min_p if body.min_p is None else body.min_p,
        seed=body.seed,
        stop=_stop(body.stop),
        stop_token_ids=tuple(stop_token_ids),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        presence_penalty=_DEFAULTS.presence_penalty if body.presence_penalty is None else body.presence_penalty,
        frequency_penalty=_DEFAULTS.frequency_penalty if body.frequency_penalty is None else body.frequency_penalty,
        repetition_penalty=_DEFAULTS.repetition_penalty if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=_logit_bias(body.logit_bias or {}, vocab_size),
        logprobs=logprobs,
        n=1 if body.n is None else body.n,
        ignore_eos=bool(body.ignore_eos),
        skip_special_tokens=body.skip_special_tokens is not False,
        allowed_token_ids=tuple(allowed_token_ids),
    )


def _check_ranges(body: SamplingFields) -> None:
    for name, value, low, high in (
        ("temperature", body.temperature, 0, 2),
        ("min_p", body.min_p, 0, 1),
        ("presence_penalty", body.presence_penalty, -2, 2),
        ("frequency_penalty", body.frequency_penalty, -2, 2),
        ("n", body.n, 1, MAX_N),
        ("seed", body.seed, -(2**63), 2**63 - 1),
        ("top_k", body.top_k, -1, 2**31 - 1),
    ):
        if value is not None:
            _within(name, value, low, high)
    if body.top_p is not None and not 0 < body.top_p <= 1:
        raise InvalidRequestError(f"top_p must be in (0, 1], got {body.top_p}", param="top_p")
    if body.repetition_penalty is not None and not 0 < body.repetition_penalty <= 100:
        raise InvalidRequestError(
            f"repetition_penalty must be in (0, 100], got {body.repetition_penalty}", param="repetition_penalty"
        )


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"stop has {len(strings)} strings, at most {MAX_STOP_STRINGS}", param="stop")
    for text in strings:
        if not 0 < len(text) <= MAX_STOP_CHARS:
            raise InvalidRequestError(f"stop strings have 1 to {MAX_STOP_CHARS} characters", param="stop")
    return strings


def _logit_bias(bias: dict[str, float], vocab_size: int) -> dict[int, float]:
    parsed: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= MAX_ID_DIGITS) or int(key) >= vocab_size:
            raise InvalidRequestError(
                f"logit_bias: {key[:MAX_ID_DIGITS]!r} is not a token id below {vocab_size}", param="logit_bias"
            )
        _within("logit_bias", value, -100, 100)
        parsed[int(key)] = value
    return parsed


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} must be between {low} and {high}, got {value}", param=name)


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise InvalidRequestError(f"{name} must be at least {low}, got {value}", param=name)
