"""Model executors behind one protocol; torch is imported below `engine.torch` only."""
