"""Output held to a grammar: compiled off the engine's thread, then a mask of allowed tokens for every step.

Grammars are llguidance's own text (Lark with JSON schemas and regular expressions inside), made by the gateway.
Compiling and every step have bounds, so that a hostile schema costs its own request and nobody else. The mask of the
next step is computed on another thread while the model computes that step's logits.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from farfill.core.errors import EngineError, InvalidRequestError

Allowed = npt.NDArray[np.bool_]

ANY_OUTPUT = "start: /(.|\\n)*/"
"""A grammar that forbids nothing. The first one an engine prepares builds tables of the vocabulary, for up to seconds
and without letting other threads run: workers prepare this one before they serve."""

MAX_GRAMMAR_CHARS = 256 * 1024
_MAX_CACHED = 32
_TRIED_BYTES = 8
# About 20 ms for a regular expression, 0.3 s for the largest schema, 20 ms for the worst step, 100 MB of states.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=20_000,
    verbose_errors=False,
)


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at its beginning. Blocks up to a second, without the GIL.

    Raises InvalidRequestError (grammar) when the grammar is wrong, over a limit, or matches nothing at all.
    """
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(
            f"the grammar has {len(grammar)} characters, at most {MAX_GRAMMAR_CHARS}", reason="grammar"
        )
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise InvalidRequestError(_what_failed(matcher), reason="grammar")
    return matcher


def check_grammar(grammar: str) -> None:
    """What `compile_grammar` would say to any model's tokenizer. Raises InvalidRequestError.

    Also when the first few steps are over a bound: some grammars compile, and cannot take their first token.
    """
    matcher = compile_grammar(_bytes_only(), grammar)
    for _ in range(_TRIED_BYTES):
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")[:256])
        if len(allowed) and not matcher.is_error():
            matcher.consume_token(int(allowed[0]))
        if matcher.is_error():
            raise InvalidRequestError(_too_complex(matcher), reason="grammar")
        if not len(allowed) or matcher.is_stopped():
            return


class Grammars:
    """Compiled grammars of one tokenizer, the last few kept. Any thread may call it."""

    def __init__(self, tokenizer_json: Callable[[], str], vocab_size: int, eos_ids: Iterable[int]) -> None:
        """`vocab_size` is at least the tokenizer's; nothing is built before the first grammar."""
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="grammar-compile")
        self._masking = ThreadPoolExecutor(2, thread_name_prefix="grammar-mask")
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(self, grammar: str) -> Future[LLMatcher]:
        """Start compiling, or find it done. The future raises what `compile_grammar` does."""
        with self._lock:
            found = self._compiled.get(grammar)
            if found is None:
                found = self._compiling.submit(self._compile, grammar)
                self._compiled[grammar] = found
                if len(self._compiled) > _MAX_CACHED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            return found

    def constraint(self, grammar: str) -> Constraint:
        """The constraint of one new choice; waits for the compiler unless `prepare` was waited for."""
        return Constraint(self.prepare(grammar).result().deep_copy(), self._vocab_size, self._masking)

    def _compile(self, grammar: str) -> LLMatcher:
        if self._tokenizer is None:
            try:
                self._tokenizer = LLTokenizer(
                    self._tokenizer_json(), n_vocab=self._vocab_size, eos_token=self._eos_ids or None
                )
            except ValueError as error:
                raise InvalidRequestError(
                    f"output of this model's tokenizer cannot be constrained: {error}", reason="unsupported"
                ) from error
        return compile_grammar(self._tokenizer, grammar)


class Constraint:
    """Where one choice is in its grammar. Owned by the engine's thread.

    The matcher belongs to whichever thread computes a mask with it: nobody else may touch it until that is done.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, threads: ThreadPoolExecutor) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._threads = threads
        self.complete = False
        """Whether the text satisfies the grammar and nothing may follow it."""
        self._next = threads.submit(self._compute)

    def allowed(self) -> Allowed:
        """Which tokens may come now, of shape (vocab_size,). Raises InvalidRequestError (grammar_limit) over a bound:
        the grammar is the client's."""
        return self._next.result()

    def advance(self, token: int) -> None:
        """Go on with a token that was allowed. Raises as `allowed` does, EngineError for a token that was not."""
        allowed = self._next.result()
        if not self._matcher.consume_token(token):
            if allowed[token]:
                raise InvalidRequestError(_too_complex(self._matcher), reason="grammar_limit")
            raise EngineError(f"the grammar refused token {token}", reason="grammar_refused")
        self.complete = self._matcher.is_stopped()
        if not self.complete:
            self._next = self._threads.submit(self._compute)

    def _compute(self) -> Allowed:
        bits = np.zeros((self._vocab_size + 31) // 32, np.uint32)
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self._matcher.is_error():
            raise InvalidRequestError(_too_complex(self._matcher), reason="grammar_limit")
        return np.unpackbits(bits.view(np.uint8), count=self._vocab_size, bitorder="little").view(np.bool_)


def _too_complex(matcher: LLMatcher) -> str:
    return f"the grammar is too complex: {_what_failed(matcher)}"


def _what_failed(matcher: LLMatcher) -> str:
    """In one line, without the pointing carets."""
    if matcher.get_error().startswith("NoExtension"):
        return "no text satisfies it"
    lines = [line.strip() for line in matcher.get_error().replace("<non-verbose/>", "").splitlines()]
    return " ".join(line for line in lines if line.strip("^ "))[:300]


_byte_tokenizer: LLTokenizer | None = None


def _bytes_only() -> LLTokenizer:
    global _byte_tokenizer  # noqa: PLW0603 -- built once a process, and immutable
    if _byte_tokenizer is None:
        _byte_tokenizer = LLTokenizer("byte")
    return _byte_tokenizer
