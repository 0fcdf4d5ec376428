"""The TPU kernel over latents: one vector a token, which all heads read as key and as value."""
