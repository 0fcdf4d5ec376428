"""Prompts with images say on a mesh what they say on one device, and the reference."""

import pytest

from tests.engine.test_images import golden
from tests.sharding.same import run_on

MESHES = ("tp=1", "tp=2", "dp=2", "dp=2,tp=2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "meshes"),
    [
        ("vision/qwen3_vl", MESHES[:1] + MESHES[-1:]),
        ("vision/gemma3_vision", MESHES[:1] + MESHES[-1:]),
        pytest.param("vision/gemma4_vision", MESHES[:1] + MESHES[-1:], marks=pytest.mark.long),
        pytest.param("vision/qwen3_vl", MESHES[:1] + MESHES[1:3], marks=pytest.mark.long),
    ],
)
def test_prompts_with_images_are_the_same_on_every_mesh_hit_again_and_preempted(folder, meshes):
    one, *others = run_on(folder, *meshes, program="images_run.py")
    tokens = [golden(folder)[f"tokens_{prompt}"].tolist() for prompt in range(3)]
    for mesh, said in zip(meshes, (one, *others), strict=True):
        assert said["tokens"] == said["again"] == tokens, mesh
        assert said["late"] == [tokens[prompt] for prompt in (2, 1, 0, 2, 1, 2)], mesh
        assert said["other"] == one["other"] and said["fingerprint"] == one["fingerprint"], mesh
        assert said["preemptions"] > 0 and said["encoded"] == 4, mesh
        assert said["encoded_again"] == 0 and said["compiles"] == 0, mesh
