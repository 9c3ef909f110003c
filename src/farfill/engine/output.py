"""From token ids to text as it may be shown: whole characters, held back while a stop string may be forming."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from farfill.engine.grammar import Grammars

# Decoders treat the very first token specially (a leading space); a little of the prompt keeps that right.
_CONTEXT_TOKENS = 6


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer, the ids that end a text, the bytes of single tokens, and grammars over them."""

    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    vocab_size: int
    grammars: Grammars = field(repr=False, compare=False)
    _byte_of_char: dict[str, int] = field(default_factory=dict[str, int], repr=False)

    @classmethod
    def of(cls, tokenizer: Tokenizer, eos_ids: frozenset[int], vocab_size: int) -> Vocabulary:
        """A vocabulary; whether tokens spell bytes is read from the tokenizer's own decoder."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        decoder = json.dumps(json.loads(tokenizer.to_str()).get("decoder"))
        grammars = Grammars(tokenizer.to_str, max(vocab_size, tokenizer.get_vocab_size()), eos_ids)
        return cls(tokenizer, eos_ids, vocab_size, grammars, byte_alphabet() if '"ByteLevel"' in decoder else {})

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes of one token, which may be part of a character; empty for an id without a token."""
        token = self.tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_of_char:
            if all(char in self._byte_of_char for char in token):
                return bytes(self._byte_of_char[char] for char in token)
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()


class OutputText:
    """The text of one choice. Joined, what `push` and `finish` return is what the client may see."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(ids=list(prompt[-_CONTEXT_TOKENS:]), skip_special_tokens=skip_special_tokens)
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._tokens = 0
        self._held = ""

    def push(self, token_id: int) -> tuple[str, str | None]:
        """Add one token: the text that may be shown now, and the stop string that ended it, if any.

        Text of the first `min_tokens` tokens is not searched. After a stop string nothing may be pushed.
        """
        self._tokens += 1
        text = self._step(token_id)
        if self._tokens <= self._min_tokens or not self._stop:
            return text, None
        self._held += text
        start, end, matched = self._find_stop()
        if matched is not None:
            shown, self._held = self._held[: end if self._include_stop else start], ""
            return shown, matched
        keep = self._partial_stop()
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown, None

    def finish(self) -> str:
        """What was held back, now that nothing follows. The beginning of an unfinished character is dropped."""
        text, self._held = self._held, ""
        return text

    def _step(self, token_id: int) -> str:
        try:
            return self._stream.step(self._tokenizer, token_id) or ""
        except Exception:
            # The decoder could not relate the new text to what it gave out (a normalising decoder): begin anew.
            self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
            return self._stream.step(self._tokenizer, token_id) or ""

    def _find_stop(self) -> tuple[int, int, str | None]:
        """The stop string that is complete first in the held text (at one end, the longest one)."""
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if not found:
            return 0, 0, None
        end, start, stop = min(found)
        return start, end, stop

    def _partial_stop(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max(len(stop) for stop in self._stop) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0


def byte_alphabet() -> dict[str, int]:
    """The printable stand-ins of byte-level BPE (GPT-2): bytes that print are themselves, the others follow U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet
