"""The state of the checkout that a benchmark's line names."""

import pathlib
import subprocess

_ROOT = pathlib.Path(__file__).resolve().parents[1]


def git_state(folder: pathlib.Path = _ROOT) -> dict[str, object]:
    """Commit, and whether files differ from it; both None where there is no checkout or no git, as on a TPU VM."""
    sha, changes = _git(folder, "rev-parse", "--short", "HEAD"), _git(folder, "status", "--porcelain")
    return {"git": sha, "dirty": None if changes is None else changes != ""}


def _git(folder: pathlib.Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
