"""Scheduling: which rows and tokens run in a step. Integers only; nothing here imports jax."""
