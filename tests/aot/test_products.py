"""Every form's products compile for TPUs that are not here, of few rows and of many."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib

import pytest

from pallas_kernels.grouped_matmul.cases import TPU_CASES as EXPERTS
from pallas_kernels.quantized_matmul.cases import TPU_CASES
from tests.support import ROOT

pytestmark = pytest.mark.aot
GENERATIONS = ("v5e", "v6e", "v7x")


def cases_of(generation: str, *, in_turn: bool) -> list[str]:
    """Cases for which it is the generation's turn, which follows from the name, or all the others."""
    names = [*(case.name for case in TPU_CASES), *(f"experts {case.name}" for case, _ in EXPERTS)]
    turn = {name: GENERATIONS[zlib.crc32(name.encode()) % len(GENERATIONS)] for name in names}
    return [name for name, its in turn.items() if (its == generation) == in_turn]


@pytest.mark.parametrize("in_turn", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["turn", "rest"])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_each_case_compiles_or_is_refused_with_a_reason(generation: str, in_turn: bool) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "tests.aot.product_program", generation, *cases_of(generation, in_turn=in_turn)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    found = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    assert len(found) == 2 * len(cases_of(generation, in_turn=in_turn))
    assert {case["name"]: case["error"] for case in found if "error" in case} == {}
    for case in found:
        few = case["name"].endswith(" 16 rows")
        if case["name"].startswith("experts ") and "refused" not in case:
            assert case["kernels"] == ["grouped_matmul"]
        elif "refused" in case:
            assert case["refused"] == ["v7x has no int8 product, which 'xla' makes exactly"]
        else:
            assert case["kernels"] == ["quantized_matmul" if few else "quantized_matmul_many"]
