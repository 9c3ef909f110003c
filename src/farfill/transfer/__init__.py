"""Moves one request's KV: pure machines, and the threads that drive them."""
