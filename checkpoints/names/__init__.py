"""What checkpoints name: patterns of modules, and lists of names in errors."""
