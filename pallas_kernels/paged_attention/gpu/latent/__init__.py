"""Decode attention over latents for Hopper."""
