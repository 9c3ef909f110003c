"""The prefill and decode HTTP servers: they join one engine with one end of the transfer plane."""
