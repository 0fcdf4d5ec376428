"""Prefixes that users have computed, pinned, saved and loaded."""
