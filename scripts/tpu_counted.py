"""What the cycles of a TPU launch come to beside its bounds: HBM, and the peak of the matrix unit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from pallas_kernels.target import Target

_BUSY = 0.75  # of its slots; where no unit is as busy, latencies bind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counted:
    """A launch on one generation. hbm_cycles, peak_cycles: that its bytes and its operations take at least.

    It takes cycles, or hbm_cycles where these are more. share: of that, the longer of its bounds. around_cycles: of
    what XLA does around the kernels, by its own estimate; they are in none of the others. binds: "HBM", the unit whose
    slots the hottest loop fills most, "latency" where it fills none, or "XLA" where cycles are its estimate.
    """

    cycles: int
    around_cycles: int
    hbm_bytes: int
    hbm_cycles: int
    peak_cycles: int
    vector_spills: int
    scalar_spills: int
    share: float
    binds: str

    @classmethod
    def of(
        cls,
        target: Target,
        *,
        cycles: int,
        around_cycles: int,
        hbm_bytes: int,
        flops: int,
        peak: str,
        unit: str,
        vector_spills: int = 0,
        scalar_spills: int = 0,
    ) -> Counted:
        """peak: the rate of the operations, "bf16", "int8" or "fp8". unit: what binds where HBM does not."""
        assert target.clock_hz is not None
        hbm_cycles = round(hbm_bytes / target.bandwidth_bytes_per_s * target.clock_hz)
        rate = {"bf16": target.flops_per_s, "int8": target.int8_ops_per_s, "fp8": target.fp8_flops_per_s}[peak]
        assert rate is not None, f"{target.generation} has no rate of {peak}"
        peak_cycles = round(flops / rate * target.clock_hz)
        return cls(
            cycles=cycles,
            around_cycles=around_cycles,
            hbm_bytes=hbm_bytes,
            hbm_cycles=hbm_cycles,
            peak_cycles=peak_cycles,
            vector_spills=vector_spills,
            scalar_spills=scalar_spills,
            share=round(max(hbm_cycles, peak_cycles) / max(cycles, hbm_cycles), 3),
            binds="HBM" if hbm_cycles >= cycles else unit,
        )

    @property
    def columns(self) -> dict[str, int]:
        """What must not get worse."""
        return {name: getattr(self, name) for name in ("cycles", "vector_spills", "scalar_spills")}


def busiest(utilization: Mapping[str, float]) -> str:
    """The unit that fills most of its slots, and how many."""
    units = {unit: used for unit, used in utilization.items() if unit != "VSTORE:SPILL"}
    unit = max(units, key=units.__getitem__)
    said = f"{unit} {units[unit]:.0%}"
    return said if units[unit] >= _BUSY else f"latency ({said})"
