"""Every case of paged attention compiles for TPUs that are not here, in place and within the memory it says."""

import json

import pytest

from pallas_kernels.paged_attention.cases import CASES, LONG_CASES, WIDE_CASES
from pallas_kernels.paged_attention.tpu.prefill.config import COMPILER_BYTES, SMEM_FIXED
from pallas_kernels.target import Target
from tests.aot.described import described, turn_of

pytestmark = pytest.mark.aot
GENERATIONS = ("v5e", "v5p", "v6e", "v7x")


def cases_of(generation: str, *, in_turn: bool) -> list[str]:
    """Cases for which it is the generation's turn, which follows from the name, or all the others that it can run.

    Prefill of real sizes compiles for half a minute, so it has no turn.
    """
    found = []
    for case in (*CASES, *WIDE_CASES, *LONG_CASES):
        if case.invariant:
            continue
        runs_on = [g for g in GENERATIONS if Target.named(f"tpu:{g}").has_fp8 or not case.kv_dtype.startswith("fp8")]
        has_turn = turn_of(case.name, runs_on) == generation and (case.tiny or case.decode_only)
        if generation in runs_on and has_turn == in_turn:
            found.append(case.name)
    return found


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((generation, in_turn), id=f"{generation}-{which}", marks=marks)
        for generation in GENERATIONS
        for in_turn, which, marks in ((True, "turn", ()), (False, "rest", pytest.mark.slow))
    ],
)
def programs(request) -> dict[str, dict]:
    """What the program of each case contains, by the case's name."""
    generation, in_turn = request.param
    found = described("case_program", generation, cases_of(generation, in_turn=in_turn))
    print(json.dumps({name: case.get("compile_s") for name, case in found.items()}))
    return found


def test_each_case_compiles(programs):
    assert {name: case["error"] for name, case in programs.items() if "error" in case} == {}


def test_its_pool_is_aliased_and_not_copied(programs):
    for name, case in compiled(programs):
        assert case["aliased_bytes"] >= case["pool_bytes"], name
        assert case["pool_copies"] == [], name


def test_no_kernel_takes_more_vector_memory_than_its_tiles_say(programs):
    """Nor much less: what an estimate makes too large is refused for nothing.

    XLA puts queries and new vectors of 256 rows in vector memory itself, so that their kernel needs no room for them.
    """
    long = {case.name for case in LONG_CASES}
    for name, case in compiled(programs):
        served = case["vmem_bytes"].keys() & case["estimates"].keys()  # not every step has both kernels
        assert served, name
        for kernel in served:
            used, estimate = case["vmem_bytes"][kernel], case["estimates"][kernel]
            assert used <= estimate, f"{name}: {kernel}"
            assert estimate <= 1.25 * used + COMPILER_BYTES or name in long, f"{name}: {kernel}"


def test_no_kernel_takes_more_scalar_memory_than_its_step_is_said_to(programs):
    for name, case in compiled(programs):
        used = max(case["smem_bytes"].values())
        assert used <= case["scalar_bytes"] <= used + SMEM_FIXED, name


def compiled(programs: dict[str, dict]) -> list[tuple[str, dict]]:
    cases = [(name, case) for name, case in programs.items() if "error" not in case]
    assert cases, "nothing compiled"
    return cases
