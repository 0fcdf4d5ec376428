"""What cycles of a TPU launch come to: its share of a bound, what binds, and what XLA estimates of the rest."""

import json
import pathlib

import pytest

from ferrum_jax.cli.device_check.estimates import TPU_CEILINGS
from pallas_kernels.target import Target
from scripts import kept_counts
from scripts.tpu_counted import Counted, busiest
from scripts.xla_cycles import estimated_cycles

_TARGET = Target.named("tpu:v6e")
_SECOND = round(_TARGET.clock_hz)  # cycles


def _counted(cycles: int, **work) -> Counted:
    given = {"hbm_bytes": 0, "flops": 0, "peak": "bf16", "unit": "VALU 80%"} | work
    return Counted.of(_TARGET, cycles=cycles, around_cycles=0, **given)


def test_bytes_and_operations_take_their_time_at_the_rates_of_the_chip():
    one = _counted(_SECOND, hbm_bytes=int(1640e9), flops=int(918e12))
    assert one.hbm_cycles == one.peak_cycles == _SECOND
    assert _counted(_SECOND, flops=int(918e12), peak="int8").peak_cycles == pytest.approx(_SECOND / 2)


def test_hbm_binds_where_bytes_take_longer_than_cycles():
    one = _counted(_SECOND // 2, hbm_bytes=int(1640e9))
    assert (one.binds, one.share) == ("HBM", 1)


def test_the_share_is_of_the_longer_bound():
    one = _counted(2 * _SECOND, hbm_bytes=int(820e9), flops=int(918e12))
    assert (one.binds, one.share) == ("VALU 80%", 0.5)


def test_a_rate_that_a_chip_lacks_is_no_bound():
    with pytest.raises(AssertionError, match="v6e has no rate of fp8"):
        _counted(1, peak="fp8")


def test_latency_binds_where_no_unit_is_busy():
    assert busiest({"MXU": 0.9, "VALU": 0.5, "VSTORE:SPILL": 1.0}) == "MXU 90%"
    assert busiest({"MXU": 0.4, "VALU": 0.5}) == "latency (VALU 50%)"


_HLO = pathlib.Path(__file__).with_suffix(".hlo").read_text()


def test_estimates_count_as_often_as_loops_turn():
    assert estimated_cycles(_HLO, turns=(5,)) == 7 + 3 * 100 + 5 * 100


@pytest.mark.parametrize("turns", [(), (1, 2)])
def test_turns_are_of_the_loops_whose_ends_are_data(turns):
    with pytest.raises(ValueError, match=f"turns has {len(turns)} numbers"):
        estimated_cycles(_HLO, turns)


def test_what_is_more_than_two_percent_worse_is_named():
    before = {"v6e": {"cycles": 100, "vector_spills": 0}}
    assert kept_counts.worse(before, {"v6e": {"cycles": 102, "vector_spills": 0}}) == []
    assert kept_counts.worse(before, {"v6e": {"cycles": 103, "vector_spills": 1}}) == [
        "v6e: cycles 100 -> 103",
        "v6e: vector_spills 0 -> 1",
    ]
    assert kept_counts.worse({}, {"v7x": {"cycles": 1}}) == ["v7x: nothing is kept"]


def test_counts_are_read_as_they_were_written(tmp_path):
    launches = {"b": {"v6e": {"cycles": 1}}, "a": {"v7x": {"cycles": 2}, "v5e": {"cycles": 3}}}
    kept_counts.write(tmp_path / "counts.json", {"jax": "1"}, launches)
    read = kept_counts.read(tmp_path / "counts.json")
    assert json.dumps(read) == json.dumps({"tools": {"jax": "1"}, "launches": launches})  # in the same order
    assert kept_counts.read(tmp_path / "none.json")["launches"] == {}


_KEPT = kept_counts.read(TPU_CEILINGS)["launches"]


@pytest.mark.parametrize("name", [name for name in _KEPT if name.startswith("jax_")])
def test_no_kernel_of_jax_beats_the_bounds_of_the_ruler(name):
    for generation, one in _KEPT[name].items():
        assert 0 < one["share"] <= 1, generation
        assert one["cycles"] >= one["peak_cycles"], generation


@pytest.mark.parametrize("generation", _KEPT.get("xla_product_bf16_512", {}))
def test_bundles_of_a_product_of_xla_agree_with_its_own_estimate(generation):
    """The estimate knows of waits that bundles do not have: on v6e and TPU7x it is half as much again."""
    one = _KEPT["xla_product_bf16_512"][generation]
    counted = max(one["cycles"], one["hbm_cycles"])
    assert 0.6 < counted / one["around_cycles"] <= 1
