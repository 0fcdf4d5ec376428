"""The run of the scalar half of a TPU kernel's schedule, on schedules written by hand."""

from __future__ import annotations

import numpy as np

from scripts import tpu_bundles, tpu_trace

_ALLOCATIONS = "  #allocation5 [shape = 's32[1]', space=smem, size = 0x200, scoped, tag = 'prefetched SMEM operand 0']"


def _runs(bundles: list[str], operand: int) -> np.ndarray:
    text = "".join(f" {i:#x} : {{ {bundle} }}\n" for i, bundle in enumerate(bundles))
    texts = tpu_bundles.bundle_texts(text)
    return tpu_trace.count_runs(texts, _ALLOCATIONS, 0, [np.array([operand], np.int32)], max_steps=1000)


def test_a_loop_over_groups_of_32_runs_as_often_as_there_are_groups() -> None:
    """The compiler halves by shifts, and takes the sign off before with an unsigned minimum."""
    bundles = [
        "%s1_s1 = sld [smem:[#allocation5]]",
        "%s2_s2 = ssub.s32 0, %s1_s1",
        "%s3_s3 = smin.u32 %s2_s2, %s1_s1",
        "%s4_s4 = sshrl.u32 %s3_s3, 5 ;; %s5_s5 = smov 0",
        "%s6_s5 = sphi %s5_s5, %s7_s5 ;; %s7_s5 = sadd.s32 1, %s6_s5",
        "%p1_p1 = scmp.ge.s32.totalorder %s7_s5, %s4_s4",
        "%9 = sbr.rel (!%p1_p1) target bundleno = 4 (0x4)",
        "%s8_s6 = smov 0",
    ]
    assert _runs(bundles, 96).tolist() == [1, 1, 1, 1, 3, 3, 3, 1]


def test_a_guarded_loop_is_entered_once_and_turns_as_often_as_it_does() -> None:
    def region(name: str, parent: int) -> tpu_bundles.Region:
        return tpu_bundles.Region(
            name=name, first=1 if parent >= 0 else 0, end=3, parent=parent, count=None, first_arm=-1, num_dma_starts=0
        )

    regions = (region("kernel", -1), region("W0", 0), region("L0", 1))
    schedule = tpu_bundles.Schedule(name="k", regions=regions, units={}, used=(), num_scalar_spills=0)
    assert schedule.counts_of([1, 256, 256]) == {"W0": 1.0, "L0": 256.0}
