"""A saved prefix cache: what was saved comes back, what is foreign or damaged is refused by name."""

import os
import shutil

import ml_dtypes
import numpy as np
import pytest

from checkpoints.folder import new_folder
from checkpoints.prefixes import load_prefixes, save_prefixes

IDENTITY = {"model": "ab12", "kv_dtype": "float32", "block_size": 16}


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((5, 4, 2, 8))
    return {
        "0/keys": rng.integers(0, 256, (5, 16)).astype(np.uint8),
        "0/0/values": values.astype(np.float32),
        "0/1/values": values.astype(ml_dtypes.bfloat16),
        "0/2/values": values.astype(ml_dtypes.float8_e4m3fn),
        "0/3/values": (values * 10).astype(np.int8),
        "0/3/scales": rng.random((5, 2, 4)).astype(np.float32),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("prefixes") / "saved"
    save_prefixes(path, IDENTITY, arrays())
    return path


@pytest.fixture
def copied(folder, tmp_path):
    """A copy to damage."""
    return shutil.copytree(folder, tmp_path / "copy")


def test_every_dtype_comes_back_bit_for_bit(folder):
    found = load_prefixes(folder, IDENTITY)
    for name, array in arrays().items():
        assert found[name].dtype == array.dtype and found[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "cd34"}, "saved holds prefixes of another engine: model is 'ab12' there and 'cd34' here"),
        ({"kv_dtype": "int8", "block_size": 32}, "block_size is 16 there and 32 here; kv_dtype is 'float32'"),
    ],
)
def test_a_foreign_folder_is_refused_with_all_that_differs(folder, change, message):
    with pytest.raises(ValueError, match=message):
        load_prefixes(folder, IDENTITY | change)


def test_invariant_mode_takes_only_what_it_saved_and_other_engines_take_both(folder, tmp_path):
    save_prefixes(tmp_path / "invariant", IDENTITY | {"invariant": True}, arrays())
    save_prefixes(tmp_path / "ordinary", IDENTITY | {"invariant": False}, arrays())
    assert load_prefixes(tmp_path / "invariant", IDENTITY | {"invariant": True})
    for saved in ("invariant", "ordinary"):
        assert load_prefixes(tmp_path / saved, IDENTITY | {"invariant": False})
    for saved in (tmp_path / "ordinary", folder):  # `folder` does not say
        with pytest.raises(
            ValueError, match=rf"{saved.name} holds .* without invariant mode.*`cache save --invariant`"
        ):
            load_prefixes(saved, IDENTITY | {"invariant": True})


def test_a_folder_that_is_no_prefix_cache_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"prefixes\.json"):
        load_prefixes(tmp_path, IDENTITY)


def test_any_byte_that_changed_is_found(copied):
    largest = max((p for p in (copied / "arrays").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    with pytest.raises(ValueError, match=r"copy.*is damaged, changed or missing are .*; save the prefixes again"):
        load_prefixes(copied, IDENTITY)


@pytest.mark.parametrize("what", ["missing", "truncated"])
def test_missing_and_truncated_files_are_found(copied, what):
    for file in (copied / "arrays").rglob("*"):
        if file.is_file() and file.stat().st_size > 100:
            file.unlink() if what == "missing" else file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(ValueError, match=r"copy.*is damaged, changed or missing are"):
        load_prefixes(copied, IDENTITY)


def test_a_changed_description_is_found(copied):
    text = (copied / "prefixes.json").read_text()
    (copied / "prefixes.json").write_text(text.replace("0/0/values", "0/9/values"))
    with pytest.raises(ValueError, match=r"prefixes\.json is damaged; save the prefixes again"):
        load_prefixes(copied, IDENTITY)


def test_a_folder_in_use_is_not_overwritten(folder):
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        save_prefixes(folder, IDENTITY, arrays())


def test_what_a_killed_process_left_is_cleared_away_and_hinders_nobody(tmp_path):
    """In a container every process may have the same number."""
    left = tmp_path / f".saved.{os.getpid()}.tmp"
    (left / "arrays").mkdir(parents=True)
    save_prefixes(tmp_path / "saved", IDENTITY, arrays())
    assert load_prefixes(tmp_path / "saved", IDENTITY).keys() == arrays().keys()
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_the_folder_of_a_process_that_still_writes_is_not_cleared_away(tmp_path):
    with new_folder(tmp_path / "saved") as first:
        with pytest.raises(OSError, match="the test"), new_folder(tmp_path / "saved"):
            raise OSError("the test")
        assert first.is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
