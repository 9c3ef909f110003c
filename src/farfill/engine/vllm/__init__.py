"""vLLM as the engine: a server process beside the worker, with a connector inside that copies KV blocks."""
