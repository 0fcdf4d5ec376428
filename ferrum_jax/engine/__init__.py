"""The engine: every token passes here. It alone joins the scheduler's integers with the runtime's arrays."""
