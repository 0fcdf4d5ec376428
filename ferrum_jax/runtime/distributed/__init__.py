"""Several processes as one: who may join, and what they say to each other. Knows no engine and no step."""
