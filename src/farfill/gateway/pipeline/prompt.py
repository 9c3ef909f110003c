"""A prompt on its way: token ids, or text that nobody has tokenized yet because nobody needed to.

A short prompt is prefilled where it is decoded, has no whole prefix block, and its worker has the tokenizer: the
gateway needs its length for limits only, and for those a bound does until the worker has counted
(`StartEvent.prompt_tokens`).
"""

from __future__ import annotations

from collections.abc import Callable

from farfill.gateway.tokenizer import LoadedTokenizer


class Prompt:
    """`text` is "" where token ids are all there is. `length` in tokens: a bound until `ids` or a worker's count."""

    __slots__ = ("_encode", "_ids", "add_special_tokens", "length", "text")

    def __init__(
        self,
        ids: list[int] | None,
        text: str = "",
        *,
        length: int = 0,
        add_special_tokens: bool = False,
        encode: Callable[[], list[int]] | None = None,
    ) -> None:
        self._ids = ids
        self._encode = encode
        self.text = text
        self.add_special_tokens = add_special_tokens
        self.length = length if ids is None else len(ids)

    @classmethod
    def of_text(cls, model: LoadedTokenizer, text: str, *, add_special_tokens: bool, text_below: int) -> Prompt:
        """Left as text when it certainly has fewer tokens than `text_below`, else tokenized here and now."""
        bound = model.most_tokens(text, add_special_tokens=add_special_tokens)
        if not text or bound is None or bound >= text_below:
            return cls(model.encode(text, add_special_tokens=add_special_tokens))
        return cls(
            None,
            text,
            length=bound,
            add_special_tokens=add_special_tokens,
            encode=lambda: model.encode(text, add_special_tokens=add_special_tokens),
        )

    @property
    def counted(self) -> bool:
        """Whether its token ids are known here."""
        return self._ids is not None

    @property
    def ids(self) -> list[int]:
        """Its token ids; a text is tokenized now, which takes a millisecond or two at most."""
        if self._ids is None:
            assert self._encode is not None, "a prompt has ids or a text"
            self._ids = self._encode()
            self.length = len(self._ids)
        return self._ids
