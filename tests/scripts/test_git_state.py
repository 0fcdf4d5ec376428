"""The state of a checkout, also of what is none."""

from __future__ import annotations

import subprocess

from scripts.git_state import git_state


def test_a_commit_and_changes_to_it_are_told(tmp_path):
    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, capture_output=True)

    git("init")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "--allow-empty", "-m", "one")
    clean = git_state(tmp_path)
    assert len(str(clean["git"])) >= 7 and clean["dirty"] is False
    (tmp_path / "file").touch()
    assert git_state(tmp_path) == {**clean, "dirty": True}


def test_where_there_is_no_checkout_nothing_is_known(tmp_path, monkeypatch):
    assert git_state(tmp_path) == {"git": None, "dirty": None}
    monkeypatch.setenv("PATH", str(tmp_path))  # nor git
    assert git_state(tmp_path) == {"git": None, "dirty": None}
