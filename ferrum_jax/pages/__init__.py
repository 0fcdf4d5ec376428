"""Pages of HTML that need nothing beside them: their look, their parts, and plots as SVG in its colours."""
