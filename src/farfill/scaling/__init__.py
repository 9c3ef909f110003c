"""The slow loop's driver: reads load from Prometheus, asks `policy.scaling`, tells whoever starts instances."""
