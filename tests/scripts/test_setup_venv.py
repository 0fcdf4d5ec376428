"""scripts/setup_venv.sh keeps an environment that works, with the Python that it was made with."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import ROOT

# As much of an interpreter as the script asks for.
FAKE = """#!/usr/bin/env bash
case "$*" in
    --version) echo "Python {version}" ;;
    *base_executable*) echo {path} ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
esac
"""


@pytest.fixture
def tree(tmp_path) -> Path:
    """A checkout with an environment of Python 3.12, and 3.11 as the machine's python3."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/setup_venv.sh", tmp_path / "scripts")
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text("a\n")
    for name, version in (("python3", "3.11.7"), ("python3.12", "3.12.3")):
        (tmp_path / name).write_text(FAKE.format(version=version, path=tmp_path / name))
        (tmp_path / name).chmod(0o755)
    set_up(tmp_path, PYTHON="python3.12")
    (tmp_path / ".venv/mine").touch()
    return tmp_path


def set_up(tree: Path, **environment: str) -> str:
    """The version of the environment after the script."""
    ours = {"PATH": f"{tree}:{os.environ['PATH']}", "EXTRAS": "test", **environment}
    program = 'set -euo pipefail; source scripts/setup_venv.sh; "$venv/bin/python" --version'
    done = subprocess.run(["bash", "-c", program], cwd=tree, capture_output=True, text=True, env=ours)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_an_environment_that_works_is_kept_though_python3_is_another(tree):
    assert set_up(tree) == "Python 3.12.3" and (tree / ".venv/mine").exists()


def test_a_python_that_is_named_makes_the_environment_anew(tree):
    assert set_up(tree, PYTHON="python3") == "Python 3.11.7" and not (tree / ".venv/mine").exists()


def test_new_requirements_make_it_anew_with_its_own_python(tree):
    (tree / "constraints.txt").write_text("b\n")
    assert set_up(tree) == "Python 3.12.3" and not (tree / ".venv/mine").exists()


def test_an_environment_that_does_not_work_is_made_with_python3(tree):
    (tree / ".venv/bin/python").unlink()
    assert set_up(tree) == "Python 3.11.7"
