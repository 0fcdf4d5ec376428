"""Adapters on the device: slots of A and B beside the weights that they add to."""
