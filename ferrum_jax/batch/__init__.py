"""Batch jobs: a file of requests in, a file of answers out, resumable at any moment. No jax."""
