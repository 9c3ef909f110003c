"""What is known about links: estimates of rate and round-trip time. Pure."""
