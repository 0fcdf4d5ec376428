"""The TPU kernel for rows of one query over latents: one vector a token, which all heads read as key and as value."""
