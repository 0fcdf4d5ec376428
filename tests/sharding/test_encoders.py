"""An encoder on a mesh makes the vectors that it makes on one device."""

import numpy as np
import pytest

from ferrum_jax import EngineConfig
from ferrum_jax.llm import LLM
from tests.rows import rows_beside
from tests.sharding.same import said_on
from tests.support import COMPILED, GOLDENS

# Each golden on the meshes of four devices that divide its heads.
MESHES = rows_beside(__file__)["meshes"]


def say(name: str, mesh: str) -> dict[str, object]:
    """Vectors of 7 texts and, so that all rows of all shards are taken, 40 more; and what a device holds."""
    config = EngineConfig(
        mesh=mesh, max_model_len=32, max_num_seqs=8, max_num_batched_tokens=256, compilation_cache_dir=str(COMPILED)
    )
    llm = LLM(str(GOLDENS / "encoders" / name), config)
    golden, rng = np.load(GOLDENS / "encoders" / name / "golden.npz"), np.random.default_rng(1)
    texts = [golden[f"prompt_{i}"][:32].tolist() for i in range(7)]
    texts += [rng.integers(5, 90, int(n)).tolist() for n in rng.integers(1, 33, 40)]
    vectors = {
        pooling: [o.embedding.tolist() for o in llm.embed(texts, pooling=pooling, progress=False)]
        for pooling in ("mean", "cls", "last")
    }
    return {
        "vectors": vectors,
        "fingerprint": llm.model.opened.model.fingerprint.digest.hex(),
        "weights_bytes": llm.ledger.weights_bytes,
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", [n if n == "bert" else pytest.param(n, marks=pytest.mark.long) for n in MESHES])
def test_vectors_on_a_mesh_equal_those_of_one_device_and_data_shards_change_no_bit(name):
    """Words are padded to a multiple of tp, those of bert 90 to 92, and the weights are the same ones."""
    one, *others = said_on(say, name, "tp=1", *MESHES[name])
    for mesh, many in zip(MESHES[name], others, strict=True):
        assert many["fingerprint"] == one["fingerprint"], mesh
        assert (many["weights_bytes"] < one["weights_bytes"]) == ("tp" in mesh), mesh
        for pooling, vectors in one["vectors"].items():
            np.testing.assert_allclose(many["vectors"][pooling], vectors, rtol=1e-5, atol=1e-5, err_msg=mesh)
        assert mesh != "dp=4" or many["vectors"] == one["vectors"]


def test_every_golden_encoder_is_on_a_mesh_of_four_devices():
    assert set(MESHES) == {path.parent.name for path in GOLDENS.glob("encoders/*/golden.npz")}
