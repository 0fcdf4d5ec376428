"""The TPU kernel for rows of several queries."""
