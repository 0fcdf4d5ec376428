"""Bodies of HTTP requests: what each endpoint is asked for, checked field by field. No jax."""
