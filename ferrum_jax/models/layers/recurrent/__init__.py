"""Layers whose cache is a state for each row."""
