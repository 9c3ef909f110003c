"""The OpenAI HTTP API and the pipeline of a request: one file a step. Runs without torch."""
