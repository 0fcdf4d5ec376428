"""Measuring a server over HTTP, from outside: what is asked and when, who asks, and what it amounts to. No jax."""
