"""Model families: from a config.json to a spec, a module and the names of its weights."""
