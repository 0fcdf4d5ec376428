"""A job's input: its formats, its rows and their order. Knows no journal and no engine."""
