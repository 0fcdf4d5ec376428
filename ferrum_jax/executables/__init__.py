"""Compiled programs as files: the store, bundles, and the environment they belong to. Knows no step."""
