"""Layers of decoder models (flax.nnx). Weights keep the Hugging Face layout, [out, in]; tokens are flat, [T, ...]."""
