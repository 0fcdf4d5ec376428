"""The host half of the central rule: requests, plans, the scheduler, the KV cache's books and drafts, without JAX."""
