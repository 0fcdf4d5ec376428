"""The ASGI application: routes, uvicorn before it, and the process that both run in. No jax."""
