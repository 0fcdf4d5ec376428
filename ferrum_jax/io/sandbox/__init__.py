"""Functions of one file's bytes, run where what they do with a hostile file can hurt nothing: a child with bounds."""
