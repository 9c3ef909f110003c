"""Prompts of exact token counts, cut from prose that ships with Farfill (`corpus.txt`).

Real sentences keep greedy output away from the ties that random token ids provoke, so a difference between two
sides means something.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

_VARIANT_STRIDE = 997  # prime, so that variants start at ever new places of the text


@dataclass(frozen=True, slots=True)
class Corpus:
    """The prose as one model's tokens; `specials` (a BOS, or nothing) start every prompt."""

    specials: tuple[int, ...]
    token_ids: tuple[int, ...]

    def prompt_of(self, tokens: int, variant: int = 0) -> tuple[int, ...]:
        """Exactly `tokens` (≥ 1) token ids; each `variant` starts elsewhere. Goes round when the text ends."""
        if tokens < 1:
            raise ValueError(f"a prompt has at least 1 token, not {tokens}")
        body = max(0, tokens - len(self.specials))
        size = len(self.token_ids)
        start = variant * _VARIANT_STRIDE % size
        turns = self.token_ids * (1 + (start + body) // size)
        return (*self.specials[:tokens], *turns[start : start + body])


def corpus_text() -> str:
    """The prose: about 28 000 characters of English, a good 6 200 tokens for common tokenizers."""
    return files("farfill.verify").joinpath("corpus.txt").read_text("utf-8")


def corpus_of(with_specials: Sequence[int], without_specials: Sequence[int]) -> Corpus:
    """The corpus from its two tokenizations, with and without special tokens."""
    if not without_specials:
        raise ValueError("the tokenizer made no tokens of the corpus")
    extra = len(with_specials) - len(without_specials)
    specials = tuple(with_specials[: max(0, extra)])
    if tuple(with_specials[len(specials) :]) != tuple(without_specials):
        specials = ()  # they are not a plain prefix (an EOS at the end, say): do without
    return Corpus(specials, tuple(without_specials))
