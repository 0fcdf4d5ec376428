"""Executables behind a URL: what one machine compiled the next one loads, and a store that fails costs a compile."""

import os
import stat
import warnings

import fsspec
import jax
import numpy as np
import pytest

from ferrum_jax.__main__ import main
from ferrum_jax.io.files.store import UrlStore
from ferrum_jax.runtime.compile.bundle import Bundle, BundledExecutables, BundleWriter
from ferrum_jax.runtime.compile.executable_store import ExecutableStore, serialize
from ferrum_jax.runtime.compile.remote_folder import local_folder, remote_of
from ferrum_jax.runtime.compile.verdicts import VerdictStore
from tests.executables.test_bundle import DOUBLE, lowered, purpose
from tests.executables.test_executable_store import lower_trivial, refuse, the_executable
from tests.support import raising

X = np.arange(3, dtype=np.float32)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """machine(name): from now on this is another machine, with a home of its own."""

    def move(name):
        (tmp_path / name).mkdir(exist_ok=True)
        monkeypatch.setenv("HOME", str(tmp_path / name))
        return tmp_path / name

    move("one")
    return move


@pytest.fixture
def url():
    system = fsspec.filesystem("memory")
    yield "memory://bucket/compiled"
    if system.exists("/bucket"):
        system.rm("/bucket", recursive=True)


@pytest.fixture
def broken(monkeypatch):
    """broken(): from now on the store does not answer."""
    fail = raising(PermissionError("no credentials"))
    system = type(fsspec.filesystem("memory"))

    def end():
        monkeypatch.setattr(system, "cat_file", fail)
        monkeypatch.setattr(system, "pipe_file", fail)

    return end


def test_what_one_machine_compiled_the_next_one_loads_and_keeps(machine, url, broken):
    expected = ExecutableStore(url).get("double", lower_trivial).result()(X)
    machine("two")
    second = ExecutableStore(url)
    np.testing.assert_array_equal(second.get("double", refuse).result()(X), expected)
    assert (second.hits, second.misses) == (1, 0)
    broken()  # the second start on this machine asks the store for nothing
    np.testing.assert_array_equal(ExecutableStore(url).get("double", refuse).result()(X), expected)


def test_what_came_from_a_url_is_found_by_those_alone_who_name_it(machine, url):
    ExecutableStore(url).get("double", lower_trivial)
    kept = local_folder(url)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700 and kept.parent == local_folder("~/.cache/ferrum_jax")
    assert local_folder(f"{url}/") == kept != local_folder(f"{url}2")
    store = ExecutableStore("~/.cache/ferrum_jax/executables")
    store.get("double", lower_trivial)
    assert (store.hits, store.misses) == (0, 1)
    os.chmod(kept, 0o777)
    with pytest.raises(ValueError, match="others can write to it"):
        ExecutableStore(url)


def test_two_writers_of_a_name_do_no_harm(machine, url):
    stores = [ExecutableStore(url)]
    machine("two")
    stores.append(ExecutableStore(url))
    for store in stores:
        assert store._fetch(store._folder / "none.executable") is None
    made = [store._make(store._folder / "same.executable", lower_trivial()) for store in stores]
    machine("three")
    third = ExecutableStore(url)
    assert third._fetch(third._folder / "same.executable")
    np.testing.assert_array_equal(made[0](X), made[1](X))


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 1000])
def test_a_damaged_object_is_compiled_again_and_replaced(machine, url, damage):
    ExecutableStore(url).get("double", lower_trivial)
    remote = UrlStore.of(url)
    path = the_executable(local_folder(url))
    whole = remote.read(path.name)
    remote.replace(path.name, damage)
    machine("two")
    again = ExecutableStore(url)
    again.get("double", lower_trivial)
    assert (again.hits, again.misses) == (0, 1)
    assert whole and len(remote.read(path.name) or b"") > 1000


def test_a_store_that_does_not_answer_is_one_sentence_and_the_engine_compiles(machine, url, broken):
    broken()
    store = ExecutableStore(url)
    with pytest.warns(RuntimeWarning, match=f"{url}, which does not answer.*no credentials") as told:
        for name in ("double", "again"):
            store.get(name, lower_trivial)
    assert len(told) == 1 and (store.hits, store.misses) == (1, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.get("double", refuse).result()(X).tolist() == [1, 3, 5]


def test_a_file_url_is_a_folder_and_an_unknown_scheme_is_refused(machine, tmp_path):
    assert (
        remote_of(f"file://{tmp_path}/store") is None and local_folder(f"file://{tmp_path}/store") == tmp_path / "store"
    )
    with pytest.raises(ValueError, match="nosuch"):
        ExecutableStore("nosuch://bucket")


def test_verdicts_of_a_url_are_kept_on_this_machine(machine, url):
    key = type("Key", (), {"name": "chip"})()
    assert VerdictStore(url, key)._path == local_folder("~/.cache/ferrum_jax") / "verdicts" / "chip.json"


@pytest.fixture
def bundle_url(tmp_path, url):
    """A bundle with one part, behind a URL."""
    folder, remote = tmp_path / "bundle", UrlStore.of(f"{url}/bundle")
    BundleWriter(folder, purpose()).put(DOUBLE, serialize(lowered(2).compile()))
    for path in folder.rglob("*"):
        if path.is_file():
            remote.replace(str(path.relative_to(folder)), path.read_bytes())
    return remote.url


def get(url, compile=refuse, *, required=True):
    source = BundledExecutables(
        Bundle.open(url), jax.devices()[:1], spec="model a", fallback=None, required=required, on_problem=lambda _: None
    )
    return source, source.get(DOUBLE, compile).result()


def test_a_bundle_behind_a_url_is_fetched_once(machine, bundle_url):
    np.testing.assert_array_equal(get(bundle_url)[1](X), 2 * X)
    (path,) = (local_folder(bundle_url) / "parts").iterdir()
    UrlStore.of(bundle_url).replace(f"parts/{path.name}", b"never read again")
    np.testing.assert_array_equal(get(bundle_url)[1](X), 2 * X)


def test_a_named_bundle_that_cannot_be_read_is_an_error(machine, url, bundle_url, broken):
    with pytest.raises(ValueError, match=f"{url}/nothing is not a bundle"):
        Bundle.open(f"{url}/nothing")
    broken()
    with pytest.raises(ValueError, match=f"bundle {bundle_url} cannot be read: .*no credentials"):
        Bundle.open(bundle_url)


def test_a_part_of_other_bytes_is_never_loaded(machine, bundle_url):
    opened = Bundle.open(bundle_url)
    (part,) = opened.parts.values()
    UrlStore.of(bundle_url).replace(f"parts/{part.sha256}.executable", b"other")
    source, executable = get(bundle_url, lambda: lowered(3), required=False)
    np.testing.assert_array_equal(executable(X), 3 * X)
    assert source.problems == [f"bundle {bundle_url}: double: its file has 5 bytes instead of {part.bytes:,}"]


def test_a_bundle_is_made_in_a_folder(capsys):
    flags = ["--model", "checkpoints/demo", "--target", "cpu", "--out", "memory://bucket/made"]
    assert main(["compile", *flags]) == 2
    assert "a bundle is made in a folder" in capsys.readouterr().err


def test_clearing_deletes_what_is_ours_and_nothing_else(machine, url, bundle_url, capsys):
    home = machine("one")
    ExecutableStore("~/.cache/ferrum_jax/executables").get("double", lower_trivial)
    ExecutableStore(url).get("double", lower_trivial)
    get(bundle_url)
    kept = home / ".cache" / "ferrum_jax"
    (kept / "executables" / "notes.txt").write_text("mine")
    (kept / "processes.secret").write_text("secret")
    sizes = [path.stat().st_size for path in kept.rglob("*") if path.suffix in (".executable", ".json")]
    assert main(["cache", "clear", "--compilation-cache-dir", url]) == 0
    assert f"{local_folder(url)}: 3 files of compiled programs deleted" in capsys.readouterr().out
    assert main(["cache", "clear", "--compilation-cache-dir", ""]) == 2  # not the usual folder
    assert "leave it out to clear the usual one" in capsys.readouterr().err
    assert main(["cache", "clear"]) == 0
    printed = capsys.readouterr().out
    assert len(sizes) == 8 and "5 files of compiled programs deleted" in printed
    left = sorted(str(path.relative_to(kept)) for path in kept.rglob("*"))
    assert left == ["executables", "executables/notes.txt", "processes.secret"]
    machine("two")
    assert ExecutableStore(url).get("double", refuse).result()(X).tolist() == [1, 3, 5], "the store stays as it is"
