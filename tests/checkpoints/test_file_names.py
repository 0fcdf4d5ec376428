"""Names that come with data lead nowhere outside their folder; links that a user has in it are followed."""

import json
import os
import string
from pathlib import Path

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints import open_checkpoint
from checkpoints.file_names import name_inside
from checkpoints.orbax_folder import DESCRIPTION, read_description
from checkpoints.remote import RemoteFolder
from tests.checkpoints.folders import HARMLESS, RULES, parameters, targets, tensors, write_sharded, write_single
from tests.rows import rows_beside

OUTSIDE = rows_beside(__file__)["outside"]


@pytest.mark.parametrize("name", [*OUTSIDE, None, 3, "x" * 2000], ids=repr)
def test_a_name_that_leads_elsewhere_or_is_none_is_refused_with_what_holds_it(name):
    with pytest.raises(ValueError, match=r"the index names the file .* outside its folder"):
        name_inside(name, "the index")


@pytest.mark.parametrize("name", ["x", "a/b/model-00001-of-00002.safetensors", "..x", "x..", "a b/ü", ".zarray"])
def test_a_name_inside_is_itself(name):
    assert name_inside(name, "the index") == name


@given(st.text(st.sampled_from("./\\:\0ab" + string.whitespace), max_size=12))
def test_whatever_is_let_through_lies_below_the_folder(name):
    try:
        found = name_inside(name, "the index")
    except ValueError:
        return
    assert os.path.normpath(Path("/folder") / found).startswith("/folder/")


@pytest.mark.parametrize("name", ["/names/../../names-escaped", "/names/sub/../../../names-escaped"])
def test_an_object_behind_a_url_is_not_written_outside_the_temporary_folder(tmp_path, monkeypatch, name):
    monkeypatch.setattr("checkpoints.remote.tempfile.mkdtemp", lambda prefix: str(tmp_path / "a" / "b"))
    system = fsspec.filesystem("memory")
    system.pipe("/names/config.json", b"{}")
    real = system.find
    monkeypatch.setattr(type(system), "find", lambda self, root, detail: real(root, detail=True) | {name: {"size": 3}})
    with pytest.raises(ValueError, match=r"memory://names names the file .*names-escaped.* outside its folder"):
        RemoteFolder("memory://names")
    assert not any(tmp_path.rglob("*"))


def test_a_url_of_a_file_is_no_folder():
    fsspec.filesystem("memory").pipe("/single/config.json", b"{}")
    with pytest.raises(ValueError, match="holds no files; name the folder"):
        RemoteFolder("memory://single/config.json")


@pytest.mark.parametrize("field", ["parameters", "files"])
def test_the_description_of_a_checkpoint_of_ours_names_nothing_outside(tmp_path, field):
    description = {"format": 1, "dtype": "float32", "parameters": {}, "files": {}} | {field: {"../x": 1}}
    (tmp_path / DESCRIPTION).write_text(json.dumps(description))
    with pytest.raises(ValueError, match=r"ferrum_jax.json names the file '../x'"):
        read_description(tmp_path)


@pytest.mark.parametrize("write", [write_single, write_sharded])
def test_a_folder_of_links_as_a_hub_s_cache_has_them_loads(tmp_path, write):
    """snapshots/REVISION/FILE is a link to ../../blobs/DIGEST, which a name may not say and a link may."""
    made = tensors()
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0123abc", tmp_path / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(write(tmp_path / "hf", made).iterdir())):
        file.rename(blobs / f"{number:040x}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{number:040x}")
    found = open_checkpoint(snapshot).load(rules=RULES, harmless=HARMLESS, targets=targets())
    for name, array in parameters(made).items():
        np.testing.assert_array_equal(np.asarray(found[name]), array)
