"""Pages of HTML that need nothing beside them: their look, their tables, and plots as SVG."""
