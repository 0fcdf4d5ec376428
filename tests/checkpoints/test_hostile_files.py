"""Files of weights that are damaged or mean harm end in one error by name, and of a length that one reads."""

import json
import shutil
import struct

import jax
import numpy as np
import pytest

from checkpoints import Rule, convert, open_checkpoint
from checkpoints.orbax_folder import DESCRIPTION, file_sizes, group_folder, save_arrays
from checkpoints.stored_weight import WeightForm
from tests.checkpoints.folders import HARMLESS, RULES, targets, tensors, write_single
from tests.rows import rows_beside

DATA, ENTRY = np.arange(4, dtype=np.float32).tobytes(), {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
NAME = "embedding.weight"


def load(folder):
    (folder / "config.json").write_text("{}")
    wanted = {"a": jax.ShapeDtypeStruct((4,), "float32")}
    return open_checkpoint(folder).load(rules=(Rule(source="a", target="a"),), harmless=(), targets=wanted)


def write(file, header, data=DATA, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


@pytest.mark.parametrize(
    ("header", "data", "length", "says"),
    [
        ({"a": ENTRY}, DATA[:8], None, "truncated or damaged"),
        ({"a": ENTRY}, DATA * 2, None, "truncated or damaged"),
        ({"a": ENTRY}, DATA, 2**64 - 1, "truncated or damaged"),
        ({"a": ENTRY, "b": ENTRY}, DATA, None, "truncated or damaged"),
        ({"a": ENTRY | {"data_offsets": [16, 0]}}, DATA, None, "truncated or damaged"),
        ({"a": ENTRY | {"dtype": "F64"}}, DATA, None, "truncated or damaged"),
        ({"a": ENTRY | {"dtype": "F4", "shape": [32]}}, DATA, None, r"not supported: \['a F4'\]"),
        ({"a": ENTRY | {"dtype": "I32"}}, DATA, None, r"weights must be floats"),
        ({"a": ENTRY | {"shape": [2**60]}}, DATA, None, "truncated or damaged"),
        ({"a": ENTRY | {"shape": [0], "data_offsets": [0, 0]}}, b"", None, r"tensor a is \[0\]; parameter a wants"),
        ({"a": ENTRY | {"shape": [1] * 100, "data_offsets": [0, 4]}}, DATA[:4], None, r"more than 32 axes.*\['a'\]"),
        ({"a" * 2000: ENTRY}, DATA, None, "names of more than 1024 characters"),
        (b'{"__metadata__":' + b"[" * 100_000, DATA, None, "truncated or damaged"),
        (b"[]", DATA, None, "truncated or damaged"),
    ],
)
def test_a_file_that_lies_is_refused(header, data, length, says, tmp_path):
    write(tmp_path / "model.safetensors", header, data, length)
    with pytest.raises(ValueError, match=says) as refused:
        load(tmp_path)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(
    ("index", "says"),
    [
        *rows_beside(__file__)["an index that lies is refused"],
        ({"weight_map": {f"t{i}": "one.safetensors" for i in range(5000)}}, r"'t1005'\] and 4990 more, not listed"),
    ],
)
def test_an_index_that_lies_is_refused(index, says, tmp_path):
    write(tmp_path / "one.safetensors", {"a": ENTRY})
    write(tmp_path.parent / "outside.safetensors", {"a": ENTRY})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=says) as refused:
        load(tmp_path)
    assert len(str(refused.value)) < 1000


def test_of_very_many_mismatches_the_first_are_named_and_the_others_counted(tmp_path):
    empty = ENTRY | {"shape": [0], "data_offsets": [0, 0]}
    write(tmp_path / "model.safetensors", {f"t{i}": empty for i in range(5000)}, b"")
    with pytest.raises(ValueError, match="5001 mismatches") as refused:
        load(tmp_path)
    assert str(refused.value).endswith("and 4901 more") and len(str(refused.value)) < 10_000


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A checkpoint of ours."""
    folder = tmp_path_factory.mktemp("own")
    convert(write_single(folder / "hf", tensors()), folder / "out", rules=RULES, harmless=HARMLESS, targets=targets())
    return folder / "out"


def of_embedding(**changes):
    return lambda found: found["parameters"][NAME].update(changes)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        *((of_embedding(dtype=dtype), "no known dtype of") for dtype in ("O", "V1000", "M8", "<f4,<i4", None, ["f4"])),
        *((of_embedding(shape=shape), "has no shape") for shape in ([300.0, 64], ["300", 64], [-300, 64], "300")),
        (of_embedding(shape=[2**60, 64]), "the model wants"),
        (of_embedding(dtype="float16"), r"has embedding.weight as float32 \[300, 64\], and .* says float16 \[300, 64"),
        *(
            (lambda found, groups=groups: found.update(groups=groups), "groups that do not name each parameter once")
            for groups in ([], [3], ["abc"], [[NAME]], [["../../x"]], [[[]]])
        ),
        (lambda found: found["groups"].append([NAME]), "groups that do not name each parameter once"),
        (lambda found: found.update(files={"../../etc/passwd": 1}), "must be relative and not lead outside"),
        (lambda found: found.update(forms={NAME: {"kind": "int4", "group": 0}}), "group is 0; it must be a number"),
        (lambda found: found.update(forms={NAME: {"kind": "int4", "group": "a"}}), "group is 'a'; it must be a number"),
    ],
)
def test_a_description_that_lies_is_refused(change, says, own, tmp_path):
    folder = shutil.copytree(own, tmp_path / "own")
    found = json.loads((folder / DESCRIPTION).read_text())
    change(found)
    (folder / DESCRIPTION).write_text(json.dumps(found))
    with pytest.raises(ValueError, match=says) as refused:
        checkpoint = open_checkpoint(folder)
        assert checkpoint.stored_forms.forms is not None
        checkpoint.load(rules=(), harmless=(), targets=targets())
    assert len(str(refused.value)) < 1000


def test_arrays_that_are_not_what_the_description_says_are_refused(own, tmp_path):
    folder = shutil.copytree(own, tmp_path / "own")
    found = json.loads((folder / DESCRIPTION).read_text())
    for group, names in enumerate(found["groups"]):
        shutil.rmtree(folder / "params" / group_folder(group))
        save_arrays(folder / "params" / group_folder(group), {name: np.zeros((3, 3), np.int32) for name in names})
    (folder / DESCRIPTION).write_text(json.dumps(found | {"files": file_sizes(folder / "params")}))
    with pytest.raises(ValueError, match=r"as int32 \[3, 3\], and ferrum_jax.json says float32"):
        open_checkpoint(folder).load(rules=(), harmless=(), targets=targets())


@pytest.mark.parametrize("size", [0, -1, 2.5, True, "a"])
def test_a_group_of_a_form_is_a_number_of_inputs(size):
    for field in ("group", "activation_group"):
        with pytest.raises(ValueError, match=f"a form's {field} is {size!r}; it must be a number of inputs"):
            WeightForm(kind="int8", **{field: size})
