"""How tokens are chosen: the sampling parameters of one request, already validated."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Same names and meaning as the OpenAI API and vLLM. `temperature` 0 is greedy; `top_k` 0 is off.

    `seed` makes one choice reproducible; choice i of `n` uses `seed + i`. `logprobs` is the number of
    alternatives per token (None: no log-probabilities at all; 0: only the chosen token's).
    `bad_words` are token sequences that never come out whole; `allowed_token_ids`, unless empty, are the only tokens.
    `grammar`, unless empty, holds the output to a grammar in llguidance's syntax (`engine.grammar`).
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict[int, float])
    logprobs: int | None = None
    n: int = 1
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    grammar: str = ""
