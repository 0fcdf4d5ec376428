"""When a job ends and what it costs: what a user asks for, what is measured, and what follows."""
