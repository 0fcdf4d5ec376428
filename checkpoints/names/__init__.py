"""Names in checkpoints: patterns of modules, and lists of names in errors."""
