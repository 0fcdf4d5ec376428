"""Executables on disk: what is found runs the same, and what is damaged or unsafe is not run."""

import concurrent.futures
import errno
import os
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ferrum_jax.runtime.compile import environment as environments
from ferrum_jax.runtime.compile import executable_store as stores
from ferrum_jax.runtime.compile.executable_store import ExecutableStore, _checked
from ferrum_jax.runtime.compile.lowered import Lowered
from tests.forked import call
from tests.histories import seeded
from tests.support import raising


def lowered(function, *arguments, **options) -> Lowered:
    return Lowered(jax.jit(function, **options).lower(*(arguments or [jax.ShapeDtypeStruct((3,), jnp.float32)])))


def lower_trivial() -> Lowered:
    return lowered(lambda x: 2 * x + 1)


refuse = raising(AssertionError("lowered what lies on disk"))


def uncompiled(made: Lowered) -> Lowered:
    made.compile = lambda: pytest.fail("compiled what lies on disk")
    return made


def the_executable(folder):
    """The larger of the two files that an executable has; the other one holds its name."""
    return max(folder.iterdir(), key=lambda path: path.stat().st_size)


def test_a_second_get_is_a_hit_and_runs_the_same(tmp_path):
    x = np.arange(3, dtype=np.float32)
    first = ExecutableStore(str(tmp_path))
    expected = first.get("double", lower_trivial).result()(x)
    second = ExecutableStore(str(tmp_path))
    np.testing.assert_array_equal(second.get("double", refuse).result()(x), expected)
    assert (first.hits, first.misses, second.hits, second.misses) == (0, 1, 1, 0)


def test_an_executable_that_calls_lapack_runs_in_a_process_that_has_traced_nothing(tmp_path):
    def solve(a):
        return jax.lax.linalg.triangular_solve(a, a, left_side=True, lower=True)

    ExecutableStore(str(tmp_path)).get("solve", lambda: lowered(solve, jnp.eye(3)))
    assert call(solved, str(tmp_path)) == np.eye(3).tolist()


def solved(folder):
    return ExecutableStore(folder).get("solve", refuse).result()(2 * np.eye(3, dtype=np.float32)).tolist()


def test_an_equal_program_of_another_description_or_source_is_not_compiled_again(tmp_path, monkeypatch):
    ExecutableStore(str(tmp_path)).get("double", lower_trivial)
    store = ExecutableStore(str(tmp_path))
    store.get("double again", lambda: uncompiled(lower_trivial()))
    monkeypatch.setattr(environments, "_source_digest", lambda: "other comments")
    changed = ExecutableStore(str(tmp_path))
    found = changed.get("double", lambda: uncompiled(lower_trivial())).result()
    np.testing.assert_array_equal(found(np.float32([1, 2, 3])), [3, 5, 7])
    assert (store.hits, store.misses, changed.hits, changed.misses) == (1, 0, 1, 0)
    changed.get("double", refuse)


SHAPE = jax.ShapeDtypeStruct((3,), jnp.float32)
PAIR = ({"a": SHAPE, "b": SHAPE},)
UNLIKE = {  # their operations are nearly equal, and no two may share an executable
    "plain": lambda: lowered(lambda x: 2 * x + 1),
    "another constant": lambda: lowered(lambda x: 2 * x + 1.5),
    "first of two": lambda: lowered(lambda x: 2 * x["a"] + 1, *PAIR),
    "second of two": lambda: lowered(lambda x: 2 * x["b"] + 1, *PAIR),
    "other names": lambda: lowered(lambda x: 2 * x["c"] + 1, {"c": SHAPE, "d": SHAPE}),
    "result in a tuple": lambda: lowered(lambda x: (2 * x + 1,)),
    "donated": lambda: lowered(lambda x: 2 * x + 1, donate_argnums=0),
    "compiled otherwise": lambda: lowered(lambda x: 2 * x + 1, compiler_options={"xla_cpu_enable_fast_min_max": True}),
}


def test_programs_that_differ_in_anything_share_no_executable(tmp_path):
    store = ExecutableStore(str(tmp_path))
    for name, lower in UNLIKE.items():
        store.get(name, lower)
    assert (store.hits, store.misses) == (0, len(UNLIKE))
    assert all(lower().text() == lower().text() is not None for lower in UNLIKE.values())


def test_a_program_whose_text_does_not_hold_all_of_it_is_known_by_its_description(tmp_path, monkeypatch):
    monkeypatch.setattr(Lowered, "text", lambda self: None)
    store = ExecutableStore(str(tmp_path))
    for description in ("double", "double again"):
        store.get(description, lower_trivial)
    store.get("double", refuse)
    monkeypatch.setattr(environments, "_source_digest", lambda: "other comments")
    changed = ExecutableStore(str(tmp_path))
    changed.get("double", lower_trivial)
    assert (store.hits, store.misses, changed.misses) == (1, 2, 1)


@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty"])
@pytest.mark.parametrize("which", [max, min], ids=["executable", "its name"])
def test_a_damaged_file_is_written_again(tmp_path, damage, which):
    ExecutableStore(str(tmp_path)).get("double", lower_trivial)
    files = {*tmp_path.iterdir()}
    path = which(files, key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes({"flipped": data, "truncated": data[: len(data) // 2], "empty": b""}[damage])
    store = ExecutableStore(str(tmp_path))
    np.testing.assert_array_equal(store.get("double", lower_trivial).result()(np.float32([1, 2, 3])), [3, 5, 7])
    assert (store.hits, store.misses) == ((0, 1) if which is max else (1, 0))
    store.get("double", refuse)
    assert {*tmp_path.iterdir()} == files, "nothing else is left in the folder"


def test_a_whole_file_that_cannot_be_loaded_is_said_compiled_again_and_replaced(tmp_path):
    ExecutableStore(str(tmp_path)).get("double", lower_trivial)
    the_executable(tmp_path).write_bytes(_checked(b"no executable"))
    store = ExecutableStore(str(tmp_path))
    with pytest.warns(RuntimeWarning, match=r"is compiled anew: it cannot be loaded: UnpicklingError"):
        store.get("double", lower_trivial).result()
    assert (store.hits, store.misses) == (0, 1)
    store.get("double", refuse).result()


def loaded(made: Lowered):
    """The program's executable as jax's own cache gives it: written and read once."""
    return stores.load_executable(stores.serialize(made.compile()), jax.devices()[:1])


def lower_scatter() -> Lowered:
    return lowered(lambda x: x.at[jnp.arange(2)].set(jnp.where(x[:2] > 0, x[:2] + 1, x[:2])), donate_argnums=0)


def test_an_executable_of_jaxs_own_cache_is_run_but_not_kept(tmp_path, monkeypatch):
    made, twice = lower_scatter(), loaded(lower_scatter())
    monkeypatch.setattr(made, "compile", lambda: twice)
    store = ExecutableStore(str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    try:
        with pytest.warns(RuntimeWarning, match="JAX_COMPILATION_CACHE_DIR.* are not kept"):
            first = store.get("scatter", lambda: made).result()
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
    assert first(jnp.ones(3)).tolist() == [2, 2, 1]
    again = ExecutableStore(str(tmp_path))
    again.get("scatter", lower_scatter)
    assert (again.hits, again.misses) == (0, 1)
    assert ExecutableStore(str(tmp_path)).get("scatter", refuse).result()(jnp.ones(3)).tolist() == [2, 2, 1]


def test_a_kept_executable_that_lacks_its_functions_is_said_and_compiled_anew(tmp_path):
    ExecutableStore(str(tmp_path)).get("scatter", lower_scatter)
    the_executable(tmp_path).write_bytes(_checked(stores.serialize(loaded(lower_scatter()))))
    with pytest.warns(RuntimeWarning, match="is compiled anew: .*lacks its functions"):
        found = ExecutableStore(str(tmp_path)).get("scatter", lower_scatter).result()
    assert found(jnp.ones(3)).tolist() == [2, 2, 1]
    assert ExecutableStore(str(tmp_path)).get("scatter", refuse).result()(jnp.ones(3)).tolist() == [2, 2, 1]


def test_a_folder_that_others_may_write_to_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(ValueError, match=r"others can write to it.*chmod 700"):
        ExecutableStore(str(tmp_path))


def test_a_new_folder_is_for_its_owner_alone(tmp_path):
    ExecutableStore(str(tmp_path / "executables"))
    assert (tmp_path / "executables").stat().st_mode & 0o777 == 0o700


def test_over_its_size_what_was_used_longest_ago_goes(tmp_path):
    first = ExecutableStore(str(tmp_path))
    for age, name in enumerate(("stray", "a", "b"), start=1):
        before = {*tmp_path.iterdir()}
        first.get(name, lambda name=name: lowered(lambda x: x + ord(name[0])))
        for path in {*tmp_path.iterdir()} - before:
            os.utime(path, (age, age))
    size = the_executable(tmp_path).stat().st_size
    (path.parent / "tmp_of_a_killed_process").write_bytes(bytes(size))
    os.utime(path.parent / "tmp_of_a_killed_process", (1, 1))
    (path.parent / "tmp_being_written").write_bytes(bytes(size))
    store = ExecutableStore(str(tmp_path), max_bytes=2 * size + size // 2)
    store.get("a", refuse)
    store.get("c", lower_trivial)
    for name in ("a", "c"):
        store.get(name, refuse)
    kept = "two executables, a name for each, what compiles took, and what is being written"
    assert len([*tmp_path.iterdir()]) == 6 and (path.parent / "tmp_being_written").exists(), kept


def test_stores_that_share_a_folder_always_give_what_was_asked_for(tmp_path):
    """As processes do: each has a store of its own, and no lock is between them."""
    programs = {f"times {n}": lowered(lambda x, n=n: n * x) for n in range(4)}
    size = len(stores.serialize(programs["times 1"].compile()))

    def run(seed):
        order, store = random.Random(seeded(seed)), ExecutableStore(str(tmp_path), max_bytes=2 * size)
        for _ in range(25):
            n = order.randrange(4)
            found = store.get(f"times {n}", lambda n=n: programs[f"times {n}"]).result()
            np.testing.assert_array_equal(found(np.float32([1, 2, 3])), n * np.float32([1, 2, 3]))
        return store.hits, store.misses

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        counts = [*threads.map(run, range(4))]
    assert all(hits + misses == 25 for hits, misses in counts)
    assert all(path.suffix == ".executable" for path in tmp_path.iterdir())


def test_what_cannot_be_kept_runs_all_the_same_and_is_said(tmp_path, monkeypatch):

    monkeypatch.setattr(stores, "write_beside", raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.warns(RuntimeWarning, match=r"cannot be kept, so the next start compiles it again: .*No space left"):
        found = ExecutableStore(str(tmp_path)).get("double", lower_trivial).result()
    np.testing.assert_array_equal(found(np.float32([1, 2, 3])), [3, 5, 7])


def test_a_write_that_fails_leaves_nothing_behind(tmp_path):
    with pytest.raises(TypeError):
        stores.write_beside(tmp_path / "file", "no bytes")
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_cannot_be_made_is_refused_with_what_to_set(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=r"cannot be made .*choose another, or None"):
        ExecutableStore(str(tmp_path / "file" / "executables"))


def test_a_folder_that_can_only_be_read_gives_what_it_has(tmp_path, monkeypatch):
    ExecutableStore(str(tmp_path)).get("double", lower_trivial)
    monkeypatch.setattr(stores.os, "utime", raising(OSError(errno.EROFS, os.strerror(errno.EROFS))))
    x = np.arange(3, dtype=np.float32)
    np.testing.assert_array_equal(ExecutableStore(str(tmp_path)).get("double", refuse).result()(x), 2 * x + 1)


def test_a_folder_that_is_a_file_by_now_keeps_nothing_and_stops_nobody(tmp_path):
    store = ExecutableStore(str(tmp_path / "store"))
    (tmp_path / "store").rmdir()
    (tmp_path / "store").write_text("")
    with pytest.warns(RuntimeWarning, match="cannot be kept"):
        assert store.get("double", lower_trivial).result()(np.ones(3, np.float32)).tolist() == [3, 3, 3]
