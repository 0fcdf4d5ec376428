"""Towers of models that see or hear compile for devices that are not here, at their odd head sizes, and copy nothing.

By hand all of them: `-m aot -k towers`; each call takes half a CPU minute to one. "tpu" targets want libtpu beside jax,
"gpu:h200" the CUDA plugin.
"""

import pytest

from tests.aot.described import described

pytestmark = pytest.mark.aot
TARGETS = ("tpu:v5e:2x2", "tpu:v6e:2x2", "tpu:TPU7x:2x2x1", "gpu:h200")
HEAD_DIMS = {"Qwen3-VL-2B": 64, "Qwen3-VL-8B": 72, "Gemma-3-4B-images": 72, "Gemma-4-E2B": 64}
HEAD_DIMS |= {"Mistral-Small-3.1": 64, "GLM-4.1V-9B": 128, "Qwen3-ASR-1.7B": 64}
HEAD_DIMS |= {"Whisper-large-v3": 64, "Voxtral-Mini-3B": 64}
OF_SECOND_TOWERS = {"gemma4_sound": 128}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("model", HEAD_DIMS)
@pytest.mark.parametrize("target", TARGETS)
def test_towers_compile_and_neither_widen_a_weight_nor_copy_the_pool(target: str, model: str) -> None:
    found = described("tower_program", target, model)
    assert found and {call["patches"]: call["error"] for call in found if "error" in call} == {}
    for call in found:
        assert call["head_dim"] == OF_SECOND_TOWERS.get(call["tower"], HEAD_DIMS[model])
        assert call["wide_weights"] == call["constants"] == [], call["patches"]
        assert call["aliased_bytes"] >= call["pool_bytes"], call["patches"]
        assert call["temp_bytes"] < 2**30, call["patches"]
