"""OpenAI's request and response shapes: parsing, validation and rendering. No network, no state."""
