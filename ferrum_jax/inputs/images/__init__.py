"""From what a user gives as an image or video to the patches that an encoder reads, and the tokens that stand for it.

Everything here is on the host: NumPy, Pillow (extra `images`) where a file is decoded or a picture resized, and in a
child PyAV (extra `video`). Towers, which need jax, stand in rooms of their own.
"""
