"""The runs of `ferrum-jax bench`: workloads, and the error of quantised KV. Asks engines as users do."""
