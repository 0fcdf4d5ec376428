"""The TPU's kernel that chooses keys for rows of one query, and tells the kernel for latents which they are."""
