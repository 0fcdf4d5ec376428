"""Checkpoints behind a URL: ranges of the weights are read where they lie, and no more than what is asked for."""

import re
import shutil
import sys

import fsspec
import jax
import numpy as np
import pytest

from checkpoints import convert, open_checkpoint, writer
from checkpoints.huggingface import map_tensors
from checkpoints.remote import RemoteArray, RemoteFolder
from ferrum_jax.io.paths import install_command
from tests.checkpoints.folders import HARMLESS, RULES, parameters, targets, tensors, write_sharded, write_single


def upload(folder, name: str) -> str:
    """The folder in fsspec's memory; its URL."""
    system = fsspec.filesystem("memory")
    system.put(str(folder), f"/{name}", recursive=True)
    return f"memory://{name}"


@pytest.fixture
def read(monkeypatch) -> list[int]:
    """Bytes of each range that is read."""
    sizes: list[int] = []
    fetch = RemoteFolder.read

    def counted(self, name, start, end):
        sizes.append(end - start)
        return fetch(self, name, start, end)

    monkeypatch.setattr(RemoteFolder, "read", counted)
    return sizes


@pytest.mark.parametrize("write", [write_single, write_sharded])
def test_weights_behind_a_url_are_those_of_the_folder_and_leftovers_are_not_read(write, tmp_path, read):
    made = tensors()
    url = upload(write(tmp_path / "hf", made), write.__name__)
    checkpoint = open_checkpoint(url)
    assert checkpoint.kind == "huggingface" and checkpoint.config["hidden_size"] == 6
    headers = sum(read)
    found = checkpoint.load(rules=RULES, harmless=HARMLESS, targets=targets())
    expected = parameters(made)
    for name, array in expected.items():
        np.testing.assert_array_equal(np.asarray(found[name]), array)
    assert sum(read) - headers < 1.1 * sum(array.nbytes for array in expected.values())


def test_a_shard_reads_its_own_rows_alone(tmp_path, read):
    url = upload(write_single(tmp_path / "hf", tensors()), "rows")
    checkpoint = open_checkpoint(url)
    rows = map_tensors(checkpoint.remote)["model.embed_tokens.weight"]
    read.clear()
    np.testing.assert_array_equal(rows[30:40, 5:9], tensors()["model.embed_tokens.weight"][30:40, 5:9])
    assert read == [10 * 64 * 4]


def test_a_remote_array_is_sliced_turned_and_sampled_as_an_array_is():
    wanted = np.arange(60, dtype=np.int16).reshape(5, 3, 4)
    data = b"head" + wanted.tobytes()
    array = RemoteArray(lambda start, end: data[start:end], 4, np.int16, (5, 3, 4))
    for index in (
        slice(1, 4),
        (slice(0, 5, 2), slice(1, 2)),
        (slice(None), 2),
        3,
        slice(4, 1),
        (slice(None, None, -1),),
    ):
        np.testing.assert_array_equal(array[index], wanted[index])
    np.testing.assert_array_equal(array.swapaxes(-1, -2), wanted.swapaxes(-1, -2))
    np.testing.assert_array_equal(array.take(np.array([0, 1, 2, 9, 58, 59])), wanted.reshape(-1)[[0, 1, 2, 9, 58, 59]])
    assert (array.nbytes, array.ndim, len(array)) == (120, 3, 5)


def test_converting_from_a_url_gives_what_the_folder_gives(tmp_path):
    source = write_single(tmp_path / "hf", tensors())
    url = upload(source, "convert")
    how = {"rules": RULES, "harmless": HARMLESS, "targets": targets(), "dtype": "bfloat16"}
    one, other = convert(source, tmp_path / "one", **how), convert(url, tmp_path / "other", **how)
    assert one == other
    assert (tmp_path / "other" / "leftovers.safetensors").read_bytes() == (
        tmp_path / "one" / "leftovers.safetensors"
    ).read_bytes()


def test_a_checkpoint_of_ours_is_copied_to_a_folder_that_goes_with_it(tmp_path):
    made = parameters(tensors())
    writer.save(tmp_path / "ours", made, companions=write_single(tmp_path / "hf", tensors()))
    checkpoint = open_checkpoint(upload(tmp_path / "ours", "ours"))
    found = checkpoint.load(rules=(), harmless=(), targets=targets())
    assert checkpoint.kind == "orbax" and all(np.array_equal(found[name], made[name]) for name in made)
    assert isinstance(found["embedding.weight"], jax.Array)
    folder = checkpoint.path
    assert folder.is_dir()
    del checkpoint
    assert not folder.exists()


def test_what_is_truncated_missing_or_cannot_be_opened_is_named(tmp_path, monkeypatch):
    source = write_single(tmp_path / "hf", tensors())
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    checkpoint = open_checkpoint(upload(source, "short"))
    with pytest.raises(ValueError, match=r"memory://short/model.safetensors is truncated"):
        checkpoint.load(rules=RULES, harmless=HARMLESS, targets=targets())
    file.write_bytes(b"\xff" * 20)
    with pytest.raises(ValueError, match="truncated or damaged"):
        open_checkpoint(upload(source, "damaged")).load(rules=RULES, harmless=HARMLESS, targets=targets())
    shutil.rmtree(source)
    shared = write_sharded(tmp_path / "two", tensors())
    (shared / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00002.safetensors is missing"):
        open_checkpoint(upload(shared, "half")).load(rules=RULES, harmless=HARMLESS, targets=targets())
    with pytest.raises(ValueError, match="memory://nothing"):
        open_checkpoint("memory://nothing")
    with pytest.raises(ValueError, match="nonsense://x cannot be opened"):
        open_checkpoint("nonsense://x")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ValueError, match=re.escape(install_command("store"))):
        open_checkpoint("gs://bucket/model")
