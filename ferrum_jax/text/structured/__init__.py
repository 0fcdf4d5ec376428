"""Structured output: grammars, the matcher of each constrained row, demanded tool calls. Host only, no jax."""
