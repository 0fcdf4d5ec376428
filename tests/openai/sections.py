"""The sections of the table: bodies of one path, asked of one model; and what is recorded of them in answers/.

bodies/ has each section's, by name. Each body is one wish, so that what a door does with it is told by one row.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ferrum_jax import LLM, EngineConfig
from tests.rows import rows_beside
from tests.serve.running import serving_llm
from tests.support import COMPILED, GOLDENS, INVARIANT

Bodies = dict[str, Mapping[str, Any]]
Answers = Mapping[str, Mapping[str, Any]]  # of each body, by door
BODIES, ANSWERS = Path(__file__).parent / "bodies", Path(__file__).parent / "answers"
COMPLETE, CHAT, RESPOND = "/v1/completions", "/v1/chat/completions", "/v1/responses"
EMBED, SCORE, RANK = "/v1/embeddings", "/v1/score", "/v1/rerank"
TOLERANCE = 1e-4  # of a log-probability or a number of a vector, as in tests/engine


@functools.cache
def generator() -> LLM:
    return serving_llm()


@functools.cache
def embedder() -> LLM:
    stored = EngineConfig(max_model_len=64, max_num_batched_tokens=128, compilation_cache_dir=str(COMPILED))
    return LLM(str(GOLDENS / "encoders" / "bert"), dataclasses.replace(stored, max_num_seqs=8))


@functools.cache
def scorer() -> LLM:
    stored = EngineConfig(max_model_len=40, compilation_cache_dir=str(COMPILED))
    return LLM(str(GOLDENS / "scorers" / "bert"), stored)


@functools.cache
def reranker() -> LLM:
    return LLM(str(GOLDENS / "scorers" / "qwen3"), dataclasses.replace(INVARIANT, max_model_len=41))


class Section(NamedTuple):
    """Bodies of one path, asked of one model. ignores: by a server that ignores unknown fields."""

    make: Callable[[], LLM]
    path: str
    bodies: Bodies
    ignores: bool = False

    @property
    def generates(self) -> bool:
        return self.path in (COMPLETE, CHAT, RESPOND)


_LLMS = {llm.__name__: llm for llm in (generator, embedder, scorer, reranker)}
SECTIONS = {
    name: Section(
        _LLMS[llm], path, json.loads((BODIES / f"{name}.json").read_text()), ignores=name.endswith("_ignored")
    )
    for name, (llm, path) in rows_beside(__file__)["asked"].items()
}
_DEEP = {"type": "function_call", "call_id": "c", "name": "go", "arguments": "[" * 100_000}
_TOO_DEEP: dict[str, Any] = {"input": [_DEEP], "max_output_tokens": 4, "temperature": 0}
SECTIONS["responses_refused"].bodies["arguments that are too deep"] = _TOO_DEEP  # too long for a file


def record(name: str, found: Answers) -> None:
    """A line for each answer; doors that give the same share it."""
    parts = []
    for each, by_door in found.items():
        doors: dict[str, list[str]] = {}
        for door in sorted(by_door):
            doors.setdefault(json.dumps(by_door[door], ensure_ascii=False), []).append(door)
        lines = ",\n".join(f"  {json.dumps(' '.join(same))}: {value}" for value, same in doors.items())
        parts.append(f" {json.dumps(each, ensure_ascii=False)}: {{\n{lines}}}")
    (ANSWERS / f"{name}.json").write_text("{\n" + ",\n".join(parts) + "\n}\n")


@functools.cache
def recorded(name: str) -> Answers:
    found = json.loads((ANSWERS / f"{name}.json").read_text())
    return {
        each: {door: value for doors, value in by_door.items() for door in doors.split()}
        for each, by_door in found.items()
    }


def _is_close(found: float, wanted: float) -> bool:
    return abs(found - wanted) <= TOLERANCE


def differences_of(
    found: Any, wanted: Any, place: str = "", is_close: Callable[[float, float], bool] = _is_close
) -> Iterator[str]:
    """Where keys in their order, texts or whole numbers are not the same, or other numbers not nearly so."""
    if isinstance(wanted, dict) and isinstance(found, dict) and list(found) == list(wanted):
        for key in wanted:
            yield from differences_of(found[key], wanted[key], f"{place}.{key}", is_close)
    elif isinstance(wanted, list) and isinstance(found, list) and len(found) == len(wanted):
        for index, each in enumerate(wanted):
            yield from differences_of(found[index], each, f"{place}[{index}]", is_close)
    elif isinstance(wanted, float) and isinstance(found, float):
        if not is_close(found, wanted):
            yield f"{place} is {found}, and {wanted} is recorded"
    elif type(found) is not type(wanted) or found != wanted:
        yield f"{place} is {found!r}, and {wanted!r} is recorded"
