"""What is installed from a checkout wins over folders beside a script, and messages name commands that work."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from ferrum_jax.paths import install_command
from tests.support import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SCRIPT = "import checkpoints; from ferrum_jax import LLM; print(LLM, checkpoints.__name__)"


def clone(parent: Path) -> Path:
    """A clone of the repository in its usual folder, with only the packages' beginnings."""
    folder = parent / "ferrum_jax"
    for package in ("ferrum_jax", "checkpoints", "pallas_kernels"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text("LLM = 'found'\n" if package == "ferrum_jax" else "")
    text = (ROOT / "pyproject.toml").read_text()
    how = text[text.index("[tool.setuptools]") : text.index("[tool.ruff]")]
    (folder / "pyproject.toml").write_text(f"[project]\nname = 'ferrum-jax'\nversion = '0'\n{how}")
    return folder


def assert_found_beside(folder: Path, site: Path) -> None:
    """Whether a script beside the clone and beside a user's own checkpoints/ finds the packages by `site`."""
    (folder.parent / "checkpoints").mkdir()
    (folder.parent / "script.py").write_text(f"import site; site.addsitedir({str(site)!r})\n{SCRIPT}")
    run = [sys.executable, "-S", "script.py"]
    done = subprocess.run(run, cwd=folder.parent, capture_output=True, text=True, env={"PYTHONPATH": ""})
    assert done.stdout == "found checkpoints\n", done.stderr


def test_the_project_asks_for_an_editable_install_that_puts_the_checkout_on_the_path(tmp_path):
    """As setuptools installs a project whose root package has a folder: by a line in a .pth file."""
    folder, site = clone(tmp_path), tmp_path / "site"
    site.mkdir()
    root = PROJECT["tool"]["setuptools"]["package-dir"][""]
    (site / "__editable__.pth").write_text(f"{folder / root}\n")
    assert_found_beside(folder, site)


def test_an_editable_install_wins_over_the_clone_that_a_script_stands_beside(tmp_path):
    pytest.importorskip("setuptools", minversion="77", reason="an older one cannot build what pip installs")
    folder, site = clone(tmp_path), tmp_path / "site"
    site.mkdir()
    build = f"from setuptools import build_meta; print(build_meta.build_editable({str(site)!r}))"
    done = subprocess.run([sys.executable, "-c", build], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(site / done.stdout.splitlines()[-1]) as wheel:
        wheel.extractall(site)
    assert_found_beside(folder, site)


@pytest.mark.parametrize("extra", ["aot", "tpu", "gpu", "store", "columns", "ray", "plot", "structured", "server"])
def test_what_a_message_says_to_install_is_an_extra_of_this_checkout(extra):
    *command, what = shlex.split(install_command(extra))
    assert command == ["pip", "install", "-e"] and what == f"{ROOT}[{extra}]"
    assert extra in PROJECT["project"]["optional-dependencies"]


def test_packages_without_their_checkout_say_where_to_type_the_command(tmp_path):
    assert install_command("tpu", tmp_path) == "pip install -e '.[tpu]' in a checkout of ferrum_jax"
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b/pyproject.toml").touch()
    assert shlex.split(install_command("tpu", tmp_path / "a b"))[-1] == f"{tmp_path}/a b[tpu]"


def test_no_message_or_document_names_a_package_that_is_on_no_index():
    files = [path for folder in ("ferrum_jax", "checkpoints", "scripts", "docs") for path in (ROOT / folder).rglob("*")]
    texts = {path: path.read_text() for path in [*files, ROOT / "README.md"] if path.suffix in (".py", ".md", ".sh")}
    assert len(texts) > 100
    assert not [path for path, text in texts.items() if "install 'ferrum-jax[" in text or "install ferrum-jax" in text]


def test_a_users_package_in_place_of_ours_is_named_with_what_to_do(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    run = [sys.executable, "-c", "import ferrum_jax"]
    how = {"cwd": tmp_path, "capture_output": True, "text": True, "env": {"PYTHONPATH": str(ROOT)}}
    assert subprocess.run(run, **how).returncode == 0, "a folder of weights is no package"
    (tmp_path / "checkpoints/__init__.py").touch()
    said = subprocess.run(run, **how).stderr
    assert f"`import checkpoints` finds {tmp_path}/checkpoints/__init__.py in place of ferrum_jax's own" in said
    assert "rename the other one" in said and f"PYTHONPATH={ROOT}" in said
