"""OpenAI's forms, read from a job's lines and from HTTP alike: bodies, their fields, and log-probabilities. No jax."""
