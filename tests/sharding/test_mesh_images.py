"""Prompts with images or sounds say on a mesh what they say on one device, and the reference."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest

from ferrum_jax.llm import LLM
from ferrum_jax.startup.build_engine import build_engine
from tests.engine import test_gemma3_images, test_gemma4_images, test_mistral3_images
from tests.engine import test_heard_prompts as heard
from tests.engine.test_images import LADDER, asked, golden, run
from tests.sharding.same import said_on
from tests.support import GOLDENS

# Sizes of an engine, its prompts by number, and blocks that hold one of them whole and not two.
_KINDS = {
    "vision/qwen3_vl": (LADDER, asked, 8),
    "vision/glm4v": (LADDER, functools.partial(asked, folder="vision/glm4v"), 8),
    test_gemma3_images.FOLDER: (test_gemma3_images.LADDER, test_gemma3_images.prompt_of, 11),
    test_gemma4_images.FOLDER: (test_gemma4_images.CONFIG, test_gemma4_images.prompt_of, 11),
    test_mistral3_images.FOLDER: (test_mistral3_images.LADDER, test_mistral3_images.prompt_of, 9),
    "hearing/qwen3_asr": (
        dataclasses.replace(heard.LADDER, max_image_tokens=128),
        lambda prompt, brighter=0.0: heard.asked(prompt, louder=brighter),
        9,
    ),
}
MESHES = ("tp=1", "tp=2", "dp=2", "dp=2,tp=2")


def say(name: str, mesh: str) -> dict[str, object]:
    """Tokens of the golden prompts together, again, of others' images, and where blocks are few."""
    sizes, ask, few_blocks = _KINDS[name]
    config = dataclasses.replace(sizes, mesh=mesh, max_num_seqs=2)
    llm = LLM(str(GOLDENS / name), config)
    engine = build_engine(llm.loaded, config, None, fill=math.nan)
    first = run(engine, *map(ask, range(3)))
    encoded = engine.counts()["images_encoded"]
    again = run(engine, *map(ask, range(3)))
    encoded_again = engine.counts()["images_encoded"] - encoded
    other = run(engine, ask(2, brighter=0.5))
    pressed = build_engine(llm.loaded, dataclasses.replace(config, num_blocks=few_blocks), None, fill=math.nan)
    late = run(pressed, *(ask(prompt) for prompt in (2, 1, 0, 2, 1, 2)))
    return {
        "tokens": [list(output.token_ids) for output in first],
        "again": [list(output.token_ids) for output in again],
        "other": [list(output.token_ids) for output in other],
        "late": [list(output.token_ids) for output in late],
        "preemptions": pressed.scheduler.metrics().preemptions,
        "encoded": encoded,
        "encoded_again": encoded_again,
        "fingerprint": llm.loaded.fingerprint.hex(),
        "compiles": llm.stats()["compiles_after_ready"],
    }


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
