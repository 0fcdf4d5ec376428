"""Files, paths, numbers, child processes and the text of errors: what every package uses, and no JAX."""
