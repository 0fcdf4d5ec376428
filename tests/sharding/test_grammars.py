"""Rows with grammars say on a mesh what they say alone on one device; in invariant mode to the last token."""

import json
import re

import pytest

from tests.distributed.folder import write_model, write_tokenizer
from tests.sharding.same import run_on


@pytest.mark.slow
def test_rows_with_grammars_are_the_same_on_every_mesh(tmp_path):
    model = write_model(tmp_path / "model")
    write_tokenizer(model)
    meshes = ("tp=1", "dp=2,tp=2")
    found = dict(zip(meshes, run_on(str(model), *meshes, program="grammars_run.py"), strict=True))
    expected = found["tp=1"]["alone"]
    for mesh, said in found.items():
        for how in ("together", "alone", "preempted", "resumed"):
            assert said[how] == expected, f"{how} on {mesh}"
        assert said["preemptions"] > 0, mesh
        texts, reasons = said["texts"], said["reasons"]
        assert set(reasons) <= {"stop", "length"} and reasons.count("stop") >= 2
        assert reasons[0] == "length" or re.fullmatch("[a-c]{12,30}x", texts[0])
        assert texts[3] in ("yes", "no", "yesterday")
        assert reasons[2] == "length" or set(json.loads(texts[2])) <= {"a", "b", None}
