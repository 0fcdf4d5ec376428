"""Products with codes, recurrences and indexers of published sizes compile for TPUs that are not here, in place."""

import pytest

from pallas_kernels.grouped_matmul.cases import TPU_CASES as EXPERTS
from pallas_kernels.quantized_matmul.cases import TPU_CASES as PRODUCTS
from tests.aot.described import described, turn_of
from tests.rows import rows_beside

pytestmark = pytest.mark.aot
GENERATIONS = ("v5e", "v5p", "v6e", "v7x")
OF_PRODUCTS = ("v5e", "v6e", "v7x")
PRODUCT_NAMES = (*(case.name for case in PRODUCTS), *(f"experts {case.name}" for case, _ in EXPERTS))
RECURRENCES = rows_beside(__file__)["recurrences"]
IN_TURN = pytest.mark.parametrize("in_turn", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["turn", "rest"])


@IN_TURN
@pytest.mark.parametrize("generation", OF_PRODUCTS)
def test_each_product_compiles_or_is_refused_with_a_reason(generation: str, in_turn: bool) -> None:
    """Few rows and many."""
    names = [name for name in PRODUCT_NAMES if (turn_of(name, OF_PRODUCTS) == generation) == in_turn]
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


@IN_TURN
@pytest.mark.parametrize("generation", GENERATIONS)
def test_states_are_changed_in_place_and_a_turn_fits_vector_memory(generation: str, in_turn: bool) -> None:
    cases = {
        name: sizes for name, sizes in RECURRENCES.items() if (turn_of(name, GENERATIONS) == generation) == in_turn
    }
    found = described("recurrence_program", generation, cases)
    assert {name: program["error"] for name, program in found.items() if "error" in program} == {}
    assert list(found) == list(cases)
    for name, program in found.items():
        tiles = {"row_recurrence_tiles"} if name.endswith("_mixed") else set()
        assert program["kernels"].keys() == {"row_recurrence"} | tiles, name
        assert max(program["kernels"].values()) < 12 * 2**20, name
        assert program["aliased_bytes"] >= program["pool_bytes"], name
        assert program["pool_copies"] == [], name


@pytest.mark.parametrize(
    ("generation", "block_sizes"),
    [
        ("v6e", [32]),
        pytest.param("v6e", [16, 64, 128], marks=pytest.mark.slow),
        *(pytest.param(generation, [16, 32, 64, 128], marks=pytest.mark.slow) for generation in ("v5e", "v5p", "v7x")),
    ],
    ids=str,
)
def test_choosing_keys_and_reading_the_chosen_ones_compile_in_place(generation: str, block_sizes: list[int]) -> None:
    for name, kernels in described("indexer_program", generation, block_sizes).items():
        assert kernels.keys() == {"indexer_decode", "latent_attention_decode"}, name
        for kernel, program in kernels.items():
            assert program["aliased_bytes"] >= program["pool_bytes"], f"{name}: {kernel}"
            assert program["pool_copies"] == [], f"{name}: {kernel}"
            assert program["vmem_bytes"] < 16 * 2**20, f"{name}: {kernel}"
