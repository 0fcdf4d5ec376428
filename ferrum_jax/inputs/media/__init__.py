"""Media that a user may give, as bytes: where they may come from, and how many there may be."""
