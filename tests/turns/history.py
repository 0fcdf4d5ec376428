"""What git says of a checkout: whose turn it is, and which files have changed."""

import subprocess
from pathlib import Path
from typing import NamedTuple

from tests.turns.sixths import NUM_SIXTHS

NUM_COMMITS = 20


class History(NamedTuple):
    """sixth: the one in turn. lap: how often all had their turn. changed: files that differ since a commit.

    said: in a sentence, whose turn it is and what changed.
    """

    sixth: int
    lap: int
    changed: list[str]
    said: str


def history(root: Path) -> History:
    """A checkout without its past is at sixth 0, and nothing is known to have changed."""
    if _git(root, "rev-parse", "--is-shallow-repository") != "false":
        return History(0, 0, [], "sixth 0, for this checkout has no history; so the others never run here")
    count = int(_git(root, "rev-list", "--count", "--first-parent", "HEAD") or 0)
    since = _git(root, "describe", "--tags", "--abbrev=0") or f"HEAD~{min(NUM_COMMITS, max(count - 1, 0))}"
    changed = (_git(root, "diff", "--name-only", "--no-renames", since) or "").splitlines()
    sixth = count % NUM_SIXTHS
    return History(
        sixth,
        count // NUM_SIXTHS,
        changed,
        f"sixth {sixth} at commit {count}; {len(changed)} files changed since {since}",
    )


def _git(root: Path, *arguments: str) -> str | None:
    """What git says, or None where it fails."""
    try:
        run = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return run.stdout.strip() if run.returncode == 0 else None
