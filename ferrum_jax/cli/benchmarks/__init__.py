"""What `ferrum-jax bench` runs: workloads, and the error of quantised KV. Asks engines as users do."""
