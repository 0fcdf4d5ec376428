"""Users' requests for a text's structure, checked when they are made. Standard library only."""
