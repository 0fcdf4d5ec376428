"""Data shards in one program: the same results, and the collectives that are meant and no others."""

import pytest

from tests.sharding.same import assert_same, run_on

FAMILY = "mixtral_window"  # experts and a window


@pytest.mark.slow
def test_data_shards_with_shared_experts_match_one_device():
    one, many = run_on(FAMILY, "tp=1", "dp=2,tp=2")
    assert_same(FAMILY, "dp=2,tp=2", one, many)
    assert many["weights_bytes"] < one["weights_bytes"] / 2
