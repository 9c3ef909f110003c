"""Capacity planning: KV sizes from a config.json, profiles, throughput and latency models, sizing. No policy state."""
