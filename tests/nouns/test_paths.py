"""Paths that name one place are seen to, however they are written, before one is written over the other."""

import re
import sys

import pytest

from ferrum_jax.paths import NamedPath, install_command, is_url, open_url, require_apart, require_plot


def refused(read: str, written: str, **more: bool) -> bool:
    one = NamedPath(what="input", path=read, **more)
    try:
        require_apart([one, NamedPath(what="output", path=written, is_written=True)])
    except ValueError as error:
        assert written in str(error) and "name" in str(error)
        return True
    return False


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("gs://b/x", "gs://b/x"),
        ("gs://b/x", "gcs://b//y/../x"),
        ("GS://b/x", "gs://b/./x"),
        ("memory://x", "memory:///x"),
        ("s3://b/x", "s3a://b/x"),
        ("{tmp}/x", "file://{tmp}/x"),
        ("{tmp}/x", "{tmp}/folder/../x"),
        ("{tmp}/link/y", "{tmp}/folder/y"),
    ],
)
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
