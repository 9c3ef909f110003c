"""The keys and values of one attention layer of one sequence: rows in a buffer, one per token.

Rows are token-major, so that a token range is one contiguous run of bytes, and attention sees them as
[1, heads, tokens, dim] through strides. Windows keep the last W rows (what transformers' DynamicSlidingWindowLayer
keeps) in a buffer with some slack, so that a decode step appends and only sometimes shifts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

WINDOW_SLACK_TOKENS = 64

KeysAndValues = tuple[torch.Tensor, torch.Tensor]


class NewRow(NamedTuple):
    """The buffer row of a new token, and those that it may look at: `seen` from `first` on, its own included."""

    row: int
    first: int
    seen: int


class Rows(ABC):
    """k and v in buffers [rows, heads, dim]; `length` tokens were seen so far.

    `window` is how many past tokens a step may look at; 0: all.
    """

    window = 0

    def __init__(self, key_rows: torch.Tensor, value_rows: torch.Tensor) -> None:
        self.key_rows = key_rows
        self.value_rows = value_rows
        # Views made once: a decode step of a small model is mostly the cost of such calls.
        self._all_keys = key_rows.transpose(0, 1).unsqueeze(0)
        self._all_values = value_rows.transpose(0, 1).unsqueeze(0)
        self.length = 0
        # Where row 0 is, and the bytes from a row to the next: (keys, values).
        self.addresses = key_rows.data_ptr(), value_rows.data_ptr()
        self.row_bytes = (
            key_rows.stride(0) * key_rows.element_size(),
            value_rows.stride(0) * value_rows.element_size(),
        )

    @abstractmethod
    def append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> KeysAndValues:
        """Add [1, heads, q, dim]; everything the new tokens may look at, they included, in the same shape."""

    @abstractmethod
    def extend(self) -> NewRow:
        """Make room for one more token, whose keys and values the caller writes."""

    @abstractmethod
    def mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(rows that an `append` of that many will return, position of the first)."""

    @abstractmethod
    def span(self, start_token: int, end_token: int, *, attached: bool) -> tuple[int, int]:
        """Buffer rows of tokens [start, end); `attached`: they are there, otherwise where they are to go."""

    @abstractmethod
    def attach(self, tokens: int) -> None:
        """What is kept of the first `tokens` tokens is in its place."""

    @abstractmethod
    def copy_state(self, other: Rows) -> None:
        """Stand where `other` stands; the buffer was copied already."""

    def truncate(self, tokens: int) -> None:
        """Forget the tokens after the first `tokens`; those before are all still there after one decode step."""
        self.length = tokens

    def write(self, row: int, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Put [1, heads, q, dim] into rows `row` and on."""
        self._all_keys.narrow(2, row, key_states.shape[-2]).copy_(key_states)
        self._all_values.narrow(2, row, value_states.shape[-2]).copy_(value_states)

    def seen(self, row: int, count: int) -> KeysAndValues:
        """Rows [row, row + count) as [1, heads, count, dim]."""
        return self._all_keys.narrow(2, row, count), self._all_values.narrow(2, row, count)


class FullRows(Rows):
    """Keeps every token."""

    def append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> KeysAndValues:
        """All tokens so far."""
        self.write(self.length, key_states, value_states)
        self.length += key_states.shape[-2]
        return self.seen(0, self.length)

    def extend(self) -> NewRow:
        """The next row, after all before it."""
        self.length += 1
        return NewRow(self.length - 1, 0, self.length)

    def mask_sizes(self, query_length: int) -> tuple[int, int]:
        """All of them, from position 0."""
        return self.length + query_length, 0

    def span(self, start_token: int, end_token: int, *, attached: bool) -> tuple[int, int]:
        """Row i is token i."""
        return start_token, end_token

    def attach(self, tokens: int) -> None:
        """Rows [0, tokens) are in their places."""
        self.length = tokens

    def copy_state(self, other: Rows) -> None:
        """Only the length is state."""
        self.length = other.length


class WindowRows(Rows):
    """Keeps the last `window` tokens, and some before them; row 0 of the buffer is token `base`."""

    def __init__(self, key_rows: torch.Tensor, value_rows: torch.Tensor, window: int) -> None:
        super().__init__(key_rows, value_rows)
        self.window = window
        self.base = 0

    def append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> KeysAndValues:
        """The window before the new tokens, and they."""
        new, rows = key_states.shape[-2], self.key_rows.shape[0]
        first = max(self.base, self.length - self.window)
        seen = self.length - first
        if seen + new > rows:
            return self._replace(key_states, value_states, first, seen)
        if self.length + new - self.base > rows:
            self._shift(first, seen)
        self.write(self.length - self.base, key_states, value_states)
        self.length += new
        return self.seen(first - self.base, seen + new)

    def extend(self) -> NewRow:
        """The next row, after the window."""
        first = max(self.base, self.length - self.window)
        if self.length + 1 - self.base > self.key_rows.shape[0]:
            self._shift(first, self.length - first)
        self.length += 1
        return NewRow(self.length - 1 - self.base, first - self.base, self.length - first)

    def mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The window and the new tokens."""
        seen = min(self.length, self.window)
        return seen + query_length, self.length - seen

    def span(self, start_token: int, end_token: int, *, attached: bool) -> tuple[int, int]:
        """Before anything is attached, the window goes to row 0."""
        # An empty sequence has no window yet, so its place is where one is going to be attached.
        base = self.base if attached and self.length else start_token
        return start_token - base, end_token - base

    def attach(self, tokens: int) -> None:
        """The window before token `tokens` is in its place."""
        self.length = tokens
        self.base = max(0, tokens - self.window)

    def copy_state(self, other: Rows) -> None:
        """The length and where the buffer starts."""
        assert isinstance(other, WindowRows)
        self.length, self.base = other.length, other.base

    def _shift(self, first: int, seen: int) -> None:
        """Move the window to the buffer's start."""
        at = first - self.base
        for rows in (self.key_rows, self.value_rows):
            # The runs overlap when the slack is smaller than the window.
            rows[:seen] = rows[at : at + seen].clone()
        self.base = first

    def _replace(self, key_states: torch.Tensor, value_states: torch.Tensor, first: int, seen: int) -> KeysAndValues:
        """Append more than the buffer holds: attention sees all of it, the buffer keeps the end."""
        old_keys, old_values = self.seen(first - self.base, seen)
        keys = torch.cat([old_keys, key_states], dim=2)
        values = torch.cat([old_values, value_states], dim=2)
        kept = min(self.window, keys.shape[2])
        self.length += key_states.shape[-2]
        self.base = self.length - kept
        self.write(0, keys[:, :, -kept:], values[:, :, -kept:])
        return keys, values
