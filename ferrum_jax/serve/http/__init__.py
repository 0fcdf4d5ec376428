"""One HTTP request on its way: who asks, for what, when it is its turn, and what it is answered. No jax."""
