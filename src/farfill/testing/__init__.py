"""What tests and benchmarks need of a network: a bad link, and a WAN in namespaces."""
