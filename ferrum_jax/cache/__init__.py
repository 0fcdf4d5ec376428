"""Device memory that outlives a step: the pools, and how large they may be."""
