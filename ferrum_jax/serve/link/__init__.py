"""Messages between HTTP and engine, and the engine as HTTP sees it. No jax."""
