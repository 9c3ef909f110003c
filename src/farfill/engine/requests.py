"""What every engine asks of a request before it takes it, with one wording for all."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from farfill.core.errors import InvalidRequestError
from farfill.core.priority import check_priority
from farfill.core.sampling import SamplingParams
from farfill.engine.media import MediaProcessor
from farfill.engine.output import Vocabulary
from farfill.engine.protocol import EngineInfo, GenerateWork, PrefillWork
from farfill.kv.manifest import Manifest


def check_work(
    info: EngineInfo, media: MediaProcessor | None, work: PrefillWork | GenerateWork, *, at_least: int
) -> None:
    """Raise InvalidRequestError unless the engine can take `work`, whose prompt needs `at_least` so many tokens."""
    prompt = work.prompt
    check_priority(work.priority)
    if work.media_inputs is not None and media is None:
        raise InvalidRequestError(f"{info.model} takes no images here", param="media", reason="unsupported_media")
    if len(prompt) < at_least:
        raise InvalidRequestError(f"the prompt needs at least {at_least} tokens, it has {len(prompt)}", param="prompt")
    longest = info.max_context_tokens - 1
    if len(prompt) > longest:
        raise InvalidRequestError(
            f"the prompt has {len(prompt)} tokens; the context of {info.max_context_tokens} tokens leaves "
            f"room for {longest}",
            param="prompt",
        )
    if not all(0 <= token < info.vocab_size for token in prompt):
        raise InvalidRequestError(f"token ids must be from 0 to {info.vocab_size - 1}", param="prompt")


def output_tokens(info: EngineInfo, work: GenerateWork) -> int:
    """The most tokens a choice of `work` may have. Raises InvalidRequestError when none was asked for."""
    if work.sampling.max_tokens < 1 or work.sampling.n < 1:
        raise InvalidRequestError("max_tokens and n must be at least 1", param="max_tokens")
    return min(work.sampling.max_tokens, info.max_context_tokens - len(work.prompt))


def check_valid_tokens(manifest: Manifest, num_tokens: int, valid_tokens: int) -> None:
    """Raise InvalidRequestError unless a slot of `manifest` is for `num_tokens` and may be continued after so many."""
    if manifest.num_tokens != num_tokens:
        raise InvalidRequestError("the slot was reserved for other work", param="slot")
    partial = 0 < valid_tokens < num_tokens and manifest.layout.can_continue_at(valid_tokens)
    if not (valid_tokens in (0, num_tokens) or partial):
        raise InvalidRequestError(
            f"KV of {valid_tokens} of {num_tokens} tokens cannot be continued from", param="valid_tokens"
        )


def prepare_grammar(vocabulary: Vocabulary, sampling: SamplingParams) -> Future[None]:
    """`Engine.prepare`: compile the grammar off this thread; done at once without one."""
    done: Future[None] = Future()
    done.set_running_or_notify_cancel()  # others may wait for the same grammar: nobody may cancel it
    if not sampling.grammar:
        done.set_result(None)
        return done

    def pass_on(compiled: Future[Any]) -> None:
        error = compiled.exception()
        done.set_result(None) if error is None else done.set_exception(error)

    vocabulary.grammars.prepare(sampling.grammar).add_done_callback(pass_on)
    return done
