"""Kernels of the engine: one folder per op, each with an "xla" form that runs on every backend."""
