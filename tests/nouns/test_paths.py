"""Paths that name one place are seen to, however they are written, before one is written over the other.

What is installed from a checkout wins over folders beside a script, and messages name commands that work.
"""

import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from ferrum_jax.io.paths import NamedPath, install_command, is_url, open_url, require_apart, require_plot
from tests.rows import rows_beside
from tests.support import ROOT


def refused(read: str, written: str, **more: bool) -> bool:
    one = NamedPath(what="input", path=read, **more)
    try:
        require_apart([one, NamedPath(what="output", path=written, is_written=True)])
    except ValueError as error:
        assert written in str(error) and "name" in str(error)
        return True
    return False


@pytest.mark.parametrize(("one", "other"), rows_beside(__file__)["one place in two spellings is refused"])
def test_one_place_in_two_spellings_is_refused(tmp_path, one, other):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    assert refused(one.format(tmp=tmp_path), other.format(tmp=tmp_path))


def test_places_that_differ_are_not_refused(tmp_path):
    assert not refused("gs://b/x", "gs://c/x")
    assert not refused("gs://b/x", "s3://b/x")
    assert not refused(str(tmp_path / "x"), str(tmp_path / "x2"))
    assert not refused("gs://b/folder", "gs://b/folder2/x", is_owned=True)
    require_apart([NamedPath(what="a", path="x"), NamedPath(what="b", path="x")])  # both are read


def test_nothing_is_written_into_a_folder_of_its_own(tmp_path):
    assert refused("gs://b/bundle", "gs://b/bundle/x", is_owned=True)
    assert refused(str(tmp_path), str(tmp_path / "x"), is_owned=True)


def test_beside_a_models_files_others_may_be_written_but_not_over_them(tmp_path):
    (tmp_path / "config.json").touch()
    (tmp_path / "out.jsonl.report.json").touch()
    assert refused(str(tmp_path), str(tmp_path / "config.json"), is_model=True)
    assert not refused(str(tmp_path), str(tmp_path / "out.jsonl"), is_model=True)
    assert not refused(str(tmp_path), str(tmp_path / "out.jsonl.report.json"), is_model=True)


def test_a_url_is_opened_in_one_place_which_says_what_is_missing(monkeypatch):
    assert is_url("gs://x") and not is_url("/a/b")
    assert open_url("memory://a/b")[1] == "/a/b"
    with pytest.raises(ValueError, match="nonsense://x cannot be opened"):
        open_url("nonsense://x")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ValueError, match="s3://x needs a package that is missing: Install s3fs"):
        open_url("s3://x")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ValueError, match=re.escape(f"gs://x needs fsspec; {install_command('store')}")):
        open_url("gs://x")


@pytest.mark.parametrize(
    ("path", "why"),
    [("a.xyz", "its ending must be one of .png, .svg, .pdf"), ("no/a.png", "is not a folder")],
)
def test_a_plot_that_cannot_be_drawn_is_refused_before_the_work(tmp_path, path, why):
    with pytest.raises(ValueError, match=re.escape(why)):
        require_plot(tmp_path / path)
    require_plot(tmp_path / "a.png")


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


def test_an_editable_install_wins_over_the_clone_that_a_script_stands_beside(tmp_path):
    """And over the user's own checkpoints/."""
    pytest.importorskip("setuptools", minversion="77", reason="an older one cannot build what pip installs")
    folder, site = clone(tmp_path), tmp_path / "site"
    site.mkdir()
    build = f"from setuptools import build_meta; print(build_meta.build_editable({str(site)!r}))"
    done = subprocess.run([sys.executable, "-c", build], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(site / done.stdout.splitlines()[-1]) as wheel:
        wheel.extractall(site)
    (folder.parent / "checkpoints").mkdir()
    (folder.parent / "script.py").write_text(f"import site; site.addsitedir({str(site)!r})\n{SCRIPT}")
    run = [sys.executable, "-S", "script.py"]
    done = subprocess.run(run, cwd=folder.parent, capture_output=True, text=True, env={"PYTHONPATH": ""})
    assert done.stdout == "found checkpoints\n", done.stderr


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
