"""Membership: who is alive, where, with which fingerprint. A small HTTP service and its two clients."""
