"""Running the scalar half of a schedule of a few bundles."""

import numpy as np
import pytest

from scripts.tpu_bundles import Region, Schedule
from scripts.tpu_trace import count_runs
from tests.rows import rows_beside

_ALLOCATIONS = "#allocation7 [shape = 'u8[512]{0}', space=smem, scoped, tag = 'prefetched SMEM operand 0']"
# for i in range(rows[0]): if rows[1 + i] > 2: (bundle 6). Branches have one delay slot.
_TEXTS = rows_beside(__file__)["a loop with a branch"]


def test_branches_follow_the_prefetched_scalars() -> None:
    runs = count_runs(_TEXTS, _ALLOCATIONS, 1, [np.array([3, 2, 7, 1], np.int32)])
    assert runs.tolist() == [1, 3, 3, 3, 3, 1, 1, 3, 3, 3, 1]


def test_a_loop_that_does_not_end_is_an_error() -> None:
    with pytest.raises(ValueError, match="more than 50 bundles ran"):
        count_runs(_TEXTS, _ALLOCATIONS, 1, [np.full(100, 99, np.int32)], max_steps=50)


def test_an_unknown_instruction_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match=r"the scalar instruction 'sfoo\.s32' .* is not known"):
        count_runs(["0 : { %s1_s0 = sfoo.s32 1, 2 }"], _ALLOCATIONS, 1, [np.zeros(1, np.int32)])


def test_scalar_memory_that_nothing_known_fills_is_an_error() -> None:
    with pytest.raises(ValueError, match="'allocation9'"):
        count_runs(["0 : { %s1_s0 = sld [smem:[#allocation9]] }"], _ALLOCATIONS, 1, [np.zeros(1, np.int32)])


def test_what_is_stored_by_way_of_an_address_is_read_there() -> None:
    """Bundle 6 runs where the store is done; what a vector gives, here the place, counts as 0."""
    texts = rows_beside(__file__)["what is stored by way of an address"]
    assert count_runs(texts, _ALLOCATIONS, 0, [np.zeros(1, np.int32)]).tolist() == [1] * 8


@pytest.mark.parametrize("shift", [4, 0])  # where addresses count lines, and where they count granules
def test_what_a_transfer_brings_to_scalar_memory_is_read_there(shift: int) -> None:
    """Word 0x81 of operand 1 says whether bundle 7 runs."""
    address = f"%s2_s2 = sshll.u32 %s1_s1, {shift}  ;;  %s3_s3 = int_to_ptr.hbm [resolvable:$true] %s2_s2"
    texts = [
        "0 : { %s9_s9 = inlined_call_operand.hbm [shape: s32[256], index: 1, kind: input] }",
        f"1 : {{ %s1_s1 = scalar_lea.hbm %s9_s9, {16 >> shift} }}",
        f"2 : {{ {address} }}",
        "3 : { %5 = dma.hbm_to_smem /*hbm=*/%s3_s3, /*size_in_granules=*/16, /*smem=*/[#allocation7], [#allocation2] }",
        "4 : { %s4_s4 = sld [smem:[#allocation7 + $0x1]] }",
        "5 : { %p1_p1 = scmp.ne.s32.totalorder %s4_s4, 5  ;;  %s6_s6 = smov 0 }",
        "6 : { %7 = sbr.rel (%p1_p1) target bundleno = 9 (0x9), region = 1 }",
        "7 : {}",
        "8 : {}",
        "9 : {}",
    ]
    for value, runs in ((5, 1), (6, 0)):
        operand = np.zeros(256, np.int32)
        operand[129] = value
        counted = count_runs(texts, _ALLOCATIONS, 1, [np.zeros(128, np.int32), operand])
        assert counted.tolist() == [1] * 8 + [runs, 1]


def test_a_transfer_of_what_is_only_a_shape_is_an_error() -> None:
    texts = [
        "0 : { %s9_s9 = inlined_call_operand.hbm [shape: s32[256], index: 1, kind: input] }",
        "1 : { %5 = dma.hbm_to_smem /*hbm=*/%s9_s9, /*size_in_granules=*/16, /*smem=*/[#allocation7], [#allocation2] }",
    ]
    with pytest.raises(ValueError, match="operand 1, which depends on an argument without a value"):
        count_runs(texts, _ALLOCATIONS, 1, [np.zeros(128, np.int32), None])


def test_a_loop_over_groups_of_32_runs_as_often_as_there_are_groups() -> None:
    """The compiler divides by a shift and takes the sign off before, with an unsigned minimum of x and -x."""
    texts = rows_beside(__file__)["a loop over groups of 32"]
    runs = count_runs(texts, _ALLOCATIONS, 1, [np.array([96], np.int32)], max_steps=1000)
    assert runs.tolist() == [1, 1, 1, 1, 3, 3, 3, 3, 1]


def test_a_guarded_loop_is_entered_once_and_turns_as_often_as_it_does() -> None:
    spans = (("kernel", 0, -1), ("W0", 1, 0), ("L0", 1, 1))
    regions = tuple(
        Region(name=name, first=first, end=3, parent=parent, count=None, first_arm=-1, num_dma_starts=0)
        for name, first, parent in spans
    )
    schedule = Schedule(name="k", regions=regions, units={}, used=(), num_scalar_spills=0)
    assert schedule.counts_of([1, 256, 256]) == {"W0": 1.0, "L0": 256.0}
