"""Pure decisions: where a prompt is prefilled and decoded, and when the far side is left alone."""
