"""Prompts with images or sounds say on a mesh what they say on one device, and the reference."""

import dataclasses
import functools

import pytest

from ferrum_jax.llm import LLM
from tests.engine.golden_media import FAMILIES, FOLDER, QWEN, asked, golden, run
from tests.sharding.same import said_on
from tests.support import GOLDENS, fresh_engine

# Blocks that hold one prompt whole and not two, where they are not those of the family.
_FEW_BLOCKS = {FOLDER: 8, "vision/glm4v": 8, "vision/gemma4_vision": 11}
MESHES = ("tp=1", "tp=2", "dp=2", "dp=2,tp=2")


def say(name: str, mesh: str) -> dict[str, object]:
    """Tokens of the golden prompts together, again, of others' images, and where blocks are few."""
    ask = functools.partial(asked, folder=name)
    sizes, few_blocks = FAMILIES[name].ladder, _FEW_BLOCKS.get(name, FAMILIES[name].few_blocks)
    if name == QWEN:
        sizes = dataclasses.replace(sizes, max_image_tokens=128)
    config = dataclasses.replace(sizes, mesh=mesh, max_num_seqs=2)
    llm = LLM(str(GOLDENS / name), config)
    engine = fresh_engine(llm)
    first = run(engine, *map(ask, range(3)))
    encoded = _encoded(engine)
    again = run(engine, *map(ask, range(3)))
    encoded_again = _encoded(engine) - encoded
    other = run(engine, ask(2, brighter=0.5, louder=0.5))
    pressed = fresh_engine(llm, num_blocks=few_blocks)
    late = run(pressed, *(ask(prompt) for prompt in (2, 1, 0, 2, 1, 2)))
    return {
        "tokens": [list(output.token_ids) for output in first],
        "again": [list(output.token_ids) for output in again],
        "other": [list(output.token_ids) for output in other],
        "late": [list(output.token_ids) for output in late],
        "preemptions": pressed.scheduler.metrics().preemptions,
        "encoded": encoded,
        "encoded_again": encoded_again,
        "fingerprint": llm.loaded.fingerprint.digest.hex(),
        "compiles": llm.stats()["compiles_after_ready"],
    }


def _encoded(engine) -> int:
    """Images and sounds that the engine has encoded so far."""
    counts = engine.counts()
    return counts["images_encoded"] + counts["sounds_encoded"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "meshes"),
    [
        ("vision/qwen3_vl", MESHES[:1] + MESHES[-1:]),
        ("vision/gemma3_vision", MESHES[:1] + MESHES[-1:]),
        pytest.param("vision/gemma4_vision", MESHES[:1] + MESHES[-1:], marks=pytest.mark.long),
        pytest.param("vision/glm4v", MESHES[:1] + MESHES[-1:], marks=pytest.mark.long),
        pytest.param("vision/mistral3_vision", MESHES[:1] + MESHES[-1:], marks=pytest.mark.long),
        ("hearing/qwen3_asr", MESHES[:1] + MESHES[-1:]),
        pytest.param("vision/qwen3_vl", MESHES[:1] + MESHES[1:3], marks=pytest.mark.long),
    ],
)
def test_prompts_with_images_are_the_same_on_every_mesh_hit_again_and_preempted(folder, meshes):
    one, *others = said_on(say, folder, *meshes)
    tokens = [golden(folder)[f"tokens_{prompt}"].tolist() for prompt in range(3)]
    for mesh, said in zip(meshes, (one, *others), strict=True):
        assert said["tokens"] == said["again"] == tokens, mesh
        assert said["late"] == [tokens[prompt] for prompt in (2, 1, 0, 2, 1, 2)], mesh
        assert said["other"] == one["other"] and said["fingerprint"] == one["fingerprint"], mesh
        assert said["preemptions"] > 0 and said["encoded"] == (3 if folder == "hearing/qwen3_asr" else 4), mesh
        assert said["encoded_again"] == 0 and said["compiles"] == 0, mesh
