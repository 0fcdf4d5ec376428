"""`ferrum-jax check`: measures this machine, checks its kernels, and writes a page."""
