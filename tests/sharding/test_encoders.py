"""An encoder on a mesh makes the vectors that it makes on one device."""

import numpy as np
import pytest

from tests.sharding.same import run_on

MESHES = ("dp=4", "tp=4", "dp=2,tp=2")


@pytest.mark.slow
def test_vectors_on_a_mesh_equal_those_of_one_device_and_data_shards_change_no_bit():
    """90 words are padded to 92 for tp=4, and the weights are the same ones."""
    one, *others = run_on("bert", "tp=1", *MESHES, program="encoder_run.py")
    for mesh, many in zip(MESHES, others, strict=True):
        assert many["fingerprint"] == one["fingerprint"], mesh
        assert (many["weights_bytes"] < one["weights_bytes"]) == ("tp" in mesh), mesh
        for pooling, vectors in one["vectors"].items():
            np.testing.assert_allclose(many["vectors"][pooling], vectors, rtol=1e-5, atol=1e-5, err_msg=mesh)
    assert others[0]["vectors"] == one["vectors"]
