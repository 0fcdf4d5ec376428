"""Verifying: what a job wrote is read, some of its rows are answered again, and both are compared."""
