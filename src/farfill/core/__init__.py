"""Frozen values every other package speaks in, and the exception tree. Pure: imports nothing of Farfill."""
