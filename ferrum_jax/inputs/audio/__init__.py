"""From what a user gives as a sound to the features that an encoder reads, and the tokens that stand for it.

Everything here is on the host: NumPy, and the libraries of the extra `audio` where a file is decoded or resampled.
"""
