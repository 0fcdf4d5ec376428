"""Towers on the device: slots for embeddings of images, and the programs that fill them."""
