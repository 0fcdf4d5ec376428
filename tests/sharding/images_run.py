"""Run as a process of its own with several CPU devices: what prompts with images say on meshes, as JSON.

python images_run.py NAME MESH...       each mesh with hits, another brightness, and preemption
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys

from ferrum_jax.llm import LLM
from ferrum_jax.startup.build_engine import build_engine
from tests.engine import test_gemma3_images, test_gemma4_images
from tests.engine.test_images import LADDER, asked, run
from tests.support import GOLDENS

# Sizes of an engine, its prompts by number, and blocks that hold one of them whole and not two.
_KINDS = {
    "vision/qwen3_vl": (LADDER, asked, 8),
    test_gemma3_images.FOLDER: (test_gemma3_images.LADDER, test_gemma3_images.prompt_of, 11),
    test_gemma4_images.FOLDER: (test_gemma4_images.LADDER, test_gemma4_images.prompt_of, 11),
}


def say(name: str, mesh: str) -> dict[str, object]:
    """Tokens of the golden prompts together, again, of others' images, and where blocks are few."""
    sizes, ask, few_blocks = _KINDS[name]
    config = dataclasses.replace(sizes, mesh=mesh, max_num_seqs=2)
    llm = LLM(str(GOLDENS / name), config)
    engine = build_engine(llm.loaded, config, None, fill=math.nan)
    first = run(engine, *map(ask, range(3)))
    encoded = engine.image_counts()["images_encoded"]
    again = run(engine, *map(ask, range(3)))
    encoded_again = engine.image_counts()["images_encoded"] - encoded
    other = run(engine, ask(2, brighter=0.5))
    pressed = build_engine(llm.loaded, dataclasses.replace(config, num_blocks=few_blocks), None, fill=math.nan)
    late = run(pressed, *(ask(prompt) for prompt in (2, 1, 0, 2, 1, 2)))
    return {
        "tokens": [output.token_ids for output in first],
        "again": [output.token_ids for output in again],
        "other": [output.token_ids for output in other],
        "late": [output.token_ids for output in late],
        "preemptions": pressed.scheduler.metrics().preemptions,
        "encoded": encoded,
        "encoded_again": encoded_again,
        "fingerprint": llm.loaded.fingerprint.hex(),
        "compiles": llm.stats()["compiles_after_ready"],
    }


if __name__ == "__main__":
    print(json.dumps([say(sys.argv[1], mesh) for mesh in sys.argv[2:]]))
