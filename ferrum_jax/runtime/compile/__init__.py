"""Programs are compiled here, whole or in pieces, and kept as files: store, bundles, environment. Knows no step."""
