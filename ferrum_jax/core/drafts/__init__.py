"""Speculation: tokens that are likely to come next, for the engine to verify. Host only, no jax."""
