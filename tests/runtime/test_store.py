"""Executables on disk: what is found runs the same, and what is damaged or unsafe is not run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ferrum_jax.runtime.store import ExecutableStore, _checked


def compile_trivial():
    return jax.jit(lambda x: 2 * x + 1).lower(jax.ShapeDtypeStruct((3,), jnp.float32)).compile()


def refuse():
    raise AssertionError("compiled what lies on disk")


def test_a_second_get_is_a_hit_and_runs_the_same(tmp_path):
    x = np.arange(3, dtype=np.float32)
    first = ExecutableStore(str(tmp_path))
    expected = first.get("double", compile_trivial).result()(x)
    second = ExecutableStore(str(tmp_path))
    np.testing.assert_array_equal(second.get("double", refuse).result()(x), expected)
    assert (first.hits, first.misses, second.hits, second.misses) == (0, 1, 1, 0)


def test_another_description_is_another_executable(tmp_path):
    store = ExecutableStore(str(tmp_path))
    for description in ("double", "double again"):
        store.get(description, compile_trivial)
    assert (store.hits, store.misses) == (0, 2)


@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty"])
def test_a_damaged_file_is_compiled_again_and_replaced(tmp_path, damage):
    ExecutableStore(str(tmp_path)).get("double", compile_trivial)
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes({"flipped": data, "truncated": data[: len(data) // 2], "empty": b""}[damage])
    store = ExecutableStore(str(tmp_path))
    np.testing.assert_array_equal(store.get("double", compile_trivial).result()(np.float32([1, 2, 3])), [3, 5, 7])
    assert (store.hits, store.misses) == (0, 1)
    store.get("double", refuse)
    assert list(tmp_path.iterdir()) == [path], "nothing else is left in the folder"


def test_a_whole_file_that_cannot_be_loaded_is_said_compiled_again_and_replaced(tmp_path):
    ExecutableStore(str(tmp_path)).get("double", compile_trivial)
    (path,) = tmp_path.iterdir()
    path.write_bytes(_checked(b"no executable"))
    store = ExecutableStore(str(tmp_path))
    with pytest.warns(RuntimeWarning, match=r"is compiled anew: it cannot be loaded: UnpicklingError"):
        store.get("double", compile_trivial).result()
    assert (store.hits, store.misses) == (0, 1)
    store.get("double", refuse).result()


def test_a_folder_that_others_may_write_to_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(ValueError, match=r"others can write to it.*chmod 700"):
        ExecutableStore(str(tmp_path))


def test_a_new_folder_is_for_its_owner_alone(tmp_path):
    ExecutableStore(str(tmp_path / "executables"))
    assert (tmp_path / "executables").stat().st_mode & 0o777 == 0o700
