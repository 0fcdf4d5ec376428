"""Files as all parts read and write them: JSON, a file put in place whole, and folders here or behind a URL."""
