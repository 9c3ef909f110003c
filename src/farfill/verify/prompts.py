"""What parity compares: cases from the corpus and from a file of the user's own prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from farfill.core.errors import ConfigError
from farfill.verify.client import GatewayClient, GatewayRefusedError
from farfill.verify.corpus import Corpus, corpus_of, corpus_text

DEFAULT_LENGTHS = (16, 300, 2_000, 6_000)
DEFAULT_OUTPUT_TOKENS = 64
_BAD_REQUEST = 400


class PromptFileError(ConfigError):
    """The prompt file cannot be used; the message names file and line."""

    reason = "prompt_file_invalid"


class SamplingMode(StrEnum):
    """How a case samples: the arg max, or the seeded draw at temperature 0.8 and top_p 0.95."""

    GREEDY = "greedy"
    SEEDED = "seeded"


class FilePrompt(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One line of `--prompts`: text or token ids, and the output length if other than the run's."""

    prompt: str | None = None
    token_ids: list[int] | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityCase:
    """One prompt under one way of sampling. `skip` says why it cannot run (empty: it can)."""

    source: str
    token_ids: tuple[int, ...]
    max_tokens: int
    mode: SamplingMode
    seed: int
    skip: str = ""


def read_prompt_file(path: Path) -> list[tuple[int, FilePrompt]]:
    """(line number, prompt) of each line that is not blank. Raises PromptFileError naming every bad line."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PromptFileError(f"cannot read {path}: {error}") from error
    found: list[tuple[int, FilePrompt]] = []
    problems: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found.append((number, _checked(line)))
        except (msgspec.DecodeError, ValueError) as error:
            problems.append(f"{path}:{number}: {error}")
    if problems:
        raise PromptFileError("\n".join(problems))
    if not found:
        raise PromptFileError(f"{path} has no prompts")
    return found


async def load_corpus(client: GatewayClient) -> Corpus:
    """The prose as the served model's tokens."""
    text = corpus_text()
    return corpus_of(
        await client.tokenize(text, add_special_tokens=True), await client.tokenize(text, add_special_tokens=False)
    )


def corpus_cases(
    corpus: Corpus, lengths: Sequence[int], *, repeat: int, max_tokens: int, context_tokens: int
) -> Iterator[ParityCase]:
    """Both sampling modes of each length, `repeat` times with other text and another seed."""
    for turn in range(repeat):
        for number, length in enumerate(lengths):
            variant = turn * len(lengths) + number
            yield from _both_modes("corpus", corpus.prompt_of(length, variant), max_tokens, 1 + variant, context_tokens)


async def file_cases(client: GatewayClient, path: Path, *, max_tokens: int, context_tokens: int) -> list[ParityCase]:
    """Both sampling modes of each prompt of a file. Raises PromptFileError naming the line the model cannot take."""
    cases: list[ParityCase] = []
    for number, entry in read_prompt_file(path):
        token_ids = entry.token_ids
        if token_ids is None:
            token_ids = await client.tokenize(entry.prompt or "", add_special_tokens=True)
        else:
            await _check_vocabulary(client, f"{path}:{number}", token_ids)
        output = entry.max_tokens or max_tokens
        cases += _both_modes(f"{path.name}:{number}", tuple(token_ids), output, number, context_tokens)
    return cases


async def _check_vocabulary(client: GatewayClient, where: str, token_ids: Sequence[int]) -> None:
    try:
        await client.detokenize(token_ids)
    except GatewayRefusedError as error:
        if error.status != _BAD_REQUEST:
            raise
        raise PromptFileError(f"{where}: the model does not have these token ids: {error}") from error


def _checked(line: str) -> FilePrompt:
    entry = msgspec.json.decode(line, type=FilePrompt)
    if (entry.prompt is None) == (entry.token_ids is None):
        raise ValueError('give exactly one of "prompt" and "token_ids"')
    if not (entry.prompt or entry.token_ids):
        raise ValueError("the prompt is empty")
    if entry.max_tokens is not None and entry.max_tokens < 1:
        raise ValueError(f'"max_tokens" is at least 1, not {entry.max_tokens}')
    return entry


def _both_modes(
    source: str, token_ids: tuple[int, ...], max_tokens: int, seed: int, context_tokens: int
) -> Iterator[ParityCase]:
    skip = ""
    if len(token_ids) + max_tokens > context_tokens:
        skip = f"{len(token_ids)} + {max_tokens} tokens do not fit the model's context of {context_tokens}"
    elif len(token_ids) < 2:
        skip = "a prompt of one token has no KV to send"
    for mode in SamplingMode:
        yield ParityCase(source=source, token_ids=token_ids, max_tokens=max_tokens, mode=mode, seed=seed, skip=skip)
