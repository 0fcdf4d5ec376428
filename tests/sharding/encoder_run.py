"""Run as a process of its own with several CPU devices: the vectors of an encoder's golden texts on meshes, as JSON.

python encoder_run.py NAME MESH...
"""

import json
import sys

import numpy as np

from ferrum_jax import EngineConfig
from ferrum_jax.llm import LLM
from tests.support import COMPILED, GOLDENS

FOLDER = GOLDENS / "encoders"


def say(name: str, mesh: str) -> dict[str, object]:
    """Vectors of 7 texts and, so that all rows of all shards are taken, 40 more; and what a device holds."""
    config = EngineConfig(
        mesh=mesh, max_model_len=32, max_num_seqs=8, max_num_batched_tokens=256, compilation_cache_dir=str(COMPILED)
    )
    llm = LLM(str(FOLDER / name), config)
    golden, rng = np.load(FOLDER / name / "golden.npz"), np.random.default_rng(1)
    texts = [golden[f"prompt_{i}"][:32].tolist() for i in range(7)]
    texts += [rng.integers(5, 90, int(n)).tolist() for n in rng.integers(1, 33, 40)]
    vectors = {
        pooling: [o.embedding.tolist() for o in llm.embed(texts, pooling=pooling, progress=False)]
        for pooling in ("mean", "cls", "last")
    }
    return {
        "vectors": vectors,
        "fingerprint": llm.model.opened.model.fingerprint.hex(),
        "weights_bytes": llm.ledger.weights_bytes,
    }


if __name__ == "__main__":
    print(json.dumps([say(sys.argv[1], mesh) for mesh in sys.argv[2:]]))
