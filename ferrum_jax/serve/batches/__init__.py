"""Files and batches of a server: a folder that outlives it, and the clerk that has batches answered. No jax."""
