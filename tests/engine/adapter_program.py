"""The greedy tokens of an adapter's golden prompts on several meshes, beside rows of none: prints JSON, by mesh.

python -m tests.engine.adapter_program BASE ADAPTER TARGETS MESH...
"""

import dataclasses
import json
import sys

import numpy as np

from ferrum_jax import LLM, SamplingParams
from tests.support import GOLDENS, INVARIANT


def main(base: str, adapter: str, targets: str, *meshes: str) -> None:
    folder = GOLDENS / "adapters" / adapter
    with np.load(folder / "golden.npz") as golden:
        prompts = [golden[f"prompt_{i}"].tolist() for i in range(3)]
    params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    found = {}
    for mesh in meshes:
        slots = {"max_adapters": 2, "max_adapter_rank": 8, "adapter_targets": targets}
        llm = LLM(str(GOLDENS / base), dataclasses.replace(INVARIANT, mesh=mesh, **slots))
        llm.load_adapter("one", folder)
        outputs = llm.generate([[5, 6], *prompts], params, adapter=[None, "one", "one", "one"])
        found[mesh] = [output.token_ids for output in outputs[1:]]
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
