"""The tiny Whisper of tests/goldens/whisper_words, and the sounds that transformers wrote down with it."""

import functools
import json
from typing import Any

from ferrum_jax import LLM
from ferrum_jax.config import EngineConfig
from scripts.goldens.sounds import sound
from tests.support import COMPILED, GOLDENS, ROOT, one_at_a_time

NAME = "whisper_words"
RATE = 16_000
CASES: list[dict[str, Any]] = json.loads((ROOT / "tests" / "goldens" / NAME / "cases.json").read_text())
CONFIG = EngineConfig(
    max_num_seqs=4,
    max_num_batched_tokens=64,
    block_size=16,
    invariant=True,
    compilation_cache_dir=str(COMPILED),
    ready="all",
)


@functools.cache
def whisper_llm(**fields: Any) -> LLM:
    with one_at_a_time(NAME, repr(CONFIG)):
        return LLM(str(GOLDENS / NAME), CONFIG, **fields)


def how_of(case: dict[str, Any]) -> dict[str, Any]:
    """The case's arguments of `LLM.transcribe`."""
    found = {name: case[name] for name in ("language", "task", "prompt") if name in case}
    return found | ({"timestamps": "segment"} if case.get("timestamps") else {})


def sound_of(case: dict[str, Any]) -> tuple[Any, int]:
    return sound(case["seconds"], case["seed"]), RATE


def text_of(case: dict[str, Any]) -> str:
    """What transformers makes of the case's windows."""
    return "".join(window["text"] for window in case["windows"]).strip()


def name_of(case: dict[str, Any]) -> str:
    return "-".join(str(value) for name, value in case.items() if name != "windows")
