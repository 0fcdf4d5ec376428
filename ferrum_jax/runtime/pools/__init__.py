"""The pools: device memory that outlives a step, its copies on the host, and how large both may be."""
