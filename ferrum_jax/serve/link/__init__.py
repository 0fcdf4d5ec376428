"""What HTTP and engine say to one another, and the engine as HTTP sees it. No jax."""
