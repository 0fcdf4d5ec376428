"""`ferrum-jax check`: what this machine has and reaches, whether its kernels are right, and a page that says so."""
