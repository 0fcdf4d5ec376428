"""Structured output: grammars, the matcher of each constrained row, tool calls in text. Host only, no jax."""
