"""One of the `n` outputs of a generation: its KV, its sampler, its text, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence

from farfill.core.sampling import SamplingParams
from farfill.engine.executor import SequenceKV
from farfill.engine.output import OutputText, Vocabulary
from farfill.engine.protocol import Logprob, TokenEvent
from farfill.engine.sampling import Logits, Sampled, Sampler


class Choice:
    """`next_token` is what the next decode step adds to `kv`; at first the last prompt token."""

    def __init__(
        self,
        index: int,
        kv: SequenceKV,
        prompt: Sequence[int],
        *,
        params: SamplingParams,
        vocabulary: Vocabulary,
        max_tokens: int,
    ) -> None:
        self.index = index
        self.kv = kv
        self.next_token = prompt[-1]
        self._params = params
        self._vocabulary = vocabulary
        self._remaining = max_tokens
        constraint = vocabulary.grammars.constraint(params.grammar) if params.grammar else None
        self._sampler = Sampler(params, prompt, vocabulary.eos_ids, index, constraint)
        self._text = OutputText(
            vocabulary.tokenizer,
            prompt,
            stop=params.stop,
            min_tokens=params.min_tokens,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
        )

    def accept(self, logits: Logits) -> TokenEvent:
        """Choose a token from the step's logits; the event says whether the choice ends with it."""
        sampled = self._sampler.sample(logits)
        token = sampled.token_id
        self._remaining -= 1
        self.next_token = token
        text, finish_reason, stop_reason = self._end_or_text(token)
        if finish_reason is None and self._sampler.complete:
            text, finish_reason = text + self._text.finish(), "stop"
        elif finish_reason is None and self._remaining == 0:
            text, finish_reason = text + self._text.finish(), "length"
        return TokenEvent(
            index=self.index,
            token_ids=(token,),
            text=text,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            logprobs=None if sampled.logprob is None else (self._logprobs(sampled, sampled.logprob),),
        )

    def _end_or_text(self, token: int) -> tuple[str, str | None, str | int | None]:
        is_stop_id = token in self._params.stop_token_ids
        if is_stop_id or (token in self._vocabulary.eos_ids and not self._params.ignore_eos):
            text = self._text.push(token)[0] if is_stop_id and self._params.include_stop_str_in_output else ""
            return text + self._text.finish(), "stop", token if is_stop_id else None
        text, matched = self._text.push(token)
        return text, None if matched is None else "stop", matched

    def _logprobs(self, sampled: Sampled, logprob: float) -> tuple[Logprob, tuple[Logprob, ...]]:
        def named(token_id: int, value: float) -> Logprob:
            return Logprob(token_id=token_id, logprob=value, text_bytes=self._vocabulary.token_bytes(token_id))

        return named(sampled.token_id, logprob), tuple(named(*pair) for pair in sampled.top)
