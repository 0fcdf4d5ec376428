"""Sizes: of meshes, of what an engine has room for, of kernels' tiles, and those that keep bits equal."""
