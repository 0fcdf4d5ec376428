"""The tree of regions and the count of cycles, on the text of a schedule of twenty bundles."""

import pytest

from scripts.tpu_bundles import Schedule, read_schedule

# A loop of data (0x2 .. 0xf) that holds a `when` with two arms and a loop of three trips, and four bundles around it.
_BRANCHES = {
    0x2: "LB: > { %1 = sbr.rel (%p1) target bundleno = 8 (0x8), region = 1 }",
    0x3: "  : > { %2 = sbr.rel target bundleno = 9 (0x9), region = 2 }",
    0x9: "LB: >> { %s9_s1 = sadd.s32 1, %s8_s1  ;;  %7 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s1 }",
    0xA: "  : >> { %p2 = scmp.ge.s32.totalorder %s9_s1, 3 /* loop exit test */ }",
    0xB: "  : >> { %3 = sbr.rel (!%p2) target bundleno = 9 (0x9), region = 3 }",
    0x10: "  : > { %4 = sbr.rel (!%p3) target bundleno = 2 (0x2), region = 4 }",
}
_NUM_BUNDLES = 0x18


def _texts(branches: dict[int, str]) -> tuple[str, str]:
    lines = [f" {at:#x} {branches.get(at, '  :  {}')}" if at else "     0   :  {}" for at in range(_NUM_BUNDLES)]
    header = "== CAPACTIY:\nMXU, VALU, VSTORE:SPILL\n    2     4     1\n== UTILIZATION:\n"
    return "= control target key start\n" + "\n".join(lines), header + "1 2 0\n" * _NUM_BUNDLES


def _read(counts: dict[str, float], branches: dict[int, str] = _BRANCHES) -> Schedule:
    return read_schedule("kernel", *_texts(branches), "v6e").with_counts(counts)


def test_a_loop_ends_after_the_delay_slots_of_its_branch():
    schedule = _read({"L0": 5})
    assert [(r.name, r.first, r.end) for r in schedule.regions] == [
        ("kernel", 0, 0x18),
        ("L0", 0x2, 0x15),
        ("W0", 0x7, 0x8),
        ("W1", 0x8, 0x9),
        ("L1", 0x9, 0x10),
    ]


def test_a_constant_exit_test_gives_the_trips_and_inner_regions_multiply():
    assert _read({"L0": 5}).executions() == [1, 5, 5, 0, 15]


def test_the_other_arm_runs_when_the_first_does_not():

    assert _read({"L0": 4, "W0": 0.25}).executions() == [1, 4, 1, 3, 12]


def test_bundles_belong_to_the_innermost_region():
    assert _read({"L0": 1}).own_bundles() == [5, 10, 1, 1, 7]


def test_a_loop_of_data_must_be_given():
    with pytest.raises(ValueError, match=r"lacks \['L0'\](.|\n)*L0 count is data: bundles 0x2..0x15"):
        _read({}).executions()


def test_a_count_that_names_no_region_is_refused():
    with pytest.raises(ValueError, match=r"no region is called \['L7'\]:(.|\n)*L0"):
        _read({"L7": 2})


def test_transfers_are_counted_where_they_start():
    assert [r.num_dma_starts for r in _read({"L0": 1}).regions] == [1, 1, 0, 0, 1]
