"""Meshes: what a model would hold and how fast it would be on each mesh of some devices, and which one is taken."""
