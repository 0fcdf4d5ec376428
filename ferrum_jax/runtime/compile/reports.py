"""Reports: texts that are too long for a sentence, such as what a compiler says, kept for whoever reports a fault."""

from __future__ import annotations

import tempfile


def keep_report(text: str) -> str:
    """The path of a new file with the text, among the system's temporary ones; only its owner may read it."""
    number, path = tempfile.mkstemp(prefix="ferrum_jax_", suffix=".txt")
    with open(number, "w", encoding="utf-8") as file:
        file.write(text)
    return path
