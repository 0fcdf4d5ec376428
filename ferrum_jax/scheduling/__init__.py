"""Scheduling: which requests run, on which blocks. Integers only; nothing here imports jax."""
