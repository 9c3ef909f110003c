"""Farfill: prefill far, decode near."""

__version__ = "0.1.0"
