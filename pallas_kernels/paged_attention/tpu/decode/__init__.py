"""The TPU kernel for rows of one query."""
