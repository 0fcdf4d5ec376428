"""From what a user gives as an image to the patches that an encoder reads, and the tokens that stand for it.

Everything here is on the host: NumPy, and Pillow (extra `images`) where a file is decoded or a picture resized. Towers,
which need jax, stand in rooms of their own.
"""
