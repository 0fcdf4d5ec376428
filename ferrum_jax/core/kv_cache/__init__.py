"""Which blocks requests stand in, and who shares them. Integers only; nothing here imports jax."""
