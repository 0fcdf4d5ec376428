"""The forms in which models write tool calls and reasoning."""
