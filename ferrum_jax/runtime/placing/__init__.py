"""The memory that a layout takes of a device, and weights that are placed on it."""
