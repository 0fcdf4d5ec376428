"""From the deltas of an engine to texts, messages and outputs, for all doors. No jax."""
