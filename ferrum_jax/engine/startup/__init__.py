"""Starting: from what a user names to an open engine. Runs once; steps never come here."""
