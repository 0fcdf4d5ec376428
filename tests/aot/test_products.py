"""Every form's products compile for TPUs that are not here, of few rows and of many."""

from __future__ import annotations

import zlib

import pytest

from pallas_kernels.grouped_matmul.cases import TPU_CASES as EXPERTS
from pallas_kernels.quantized_matmul.cases import TPU_CASES
from tests.aot.described import described

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
    names = cases_of(generation, in_turn=in_turn)
    found = described("product_program", generation, names)
    assert len(found) == 2 * len(names)
    assert {name: case["error"] for name, case in found.items() if "error" in case} == {}
    for name, case in found.items():
        few = name.endswith(" 16 rows")
        if name.startswith("experts ") and "refused" not in case:
            assert case["kernels"] == ["grouped_matmul"]
        elif "refused" in case:
            assert case["refused"] == ["v7x has no int8 product, which 'xla' makes exactly"]
        else:
            assert case["kernels"] == ["quantized_matmul" if few else "quantized_matmul_many"]
