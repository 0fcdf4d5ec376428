"""Other libraries' interfaces over an `LLM`: each file needs the extra of its name, and nothing else imports it."""
