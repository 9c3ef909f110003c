"""Discrete events on a virtual clock: the policies that serve, before simulated instances and links."""
