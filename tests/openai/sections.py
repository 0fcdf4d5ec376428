"""The sections of the table: bodies of one path, asked of one model; and what is recorded of them in answers/."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ferrum_jax import LLM, EngineConfig
from tests.openai import chat_bodies, reading_bodies, text_bodies
from tests.serve.running import serving_llm
from tests.support import COMPILED, GOLDENS, INVARIANT

Bodies = Mapping[str, Mapping[str, Any]]
Answers = Mapping[str, Mapping[str, Any]]  # of each body, by door
ANSWERS = Path(__file__).parent / "answers"
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


SECTIONS = {
    "completions": Section(generator, COMPLETE, text_bodies.COMPLETIONS),
    "completions_refused": Section(generator, COMPLETE, text_bodies.WRONG_COMPLETIONS),
    "completions_ignored": Section(generator, COMPLETE, reading_bodies.IGNORED, ignores=True),
    "chats": Section(generator, CHAT, chat_bodies.CHATS),
    "chats_refused": Section(generator, CHAT, chat_bodies.WRONG_CHATS),
    "chats_ignored": Section(generator, CHAT, reading_bodies.IGNORED_CHATS, ignores=True),
    "responses": Section(generator, RESPOND, chat_bodies.RESPONSES),
    "responses_refused": Section(generator, RESPOND, chat_bodies.WRONG_RESPONSES),
    "responses_ignored": Section(generator, RESPOND, reading_bodies.IGNORED_RESPONSES, ignores=True),
    "embeddings": Section(embedder, EMBED, reading_bodies.EMBEDDINGS),
    "embeddings_refused": Section(embedder, EMBED, reading_bodies.WRONG_EMBEDDINGS),
    "embeddings_ignored": Section(embedder, EMBED, reading_bodies.IGNORED_VECTORS, ignores=True),
    "scores": Section(scorer, SCORE, reading_bodies.SCORES),
    "scores_refused": Section(scorer, SCORE, reading_bodies.WRONG_SCORES),
    "scores_ignored": Section(scorer, SCORE, reading_bodies.IGNORED_SCORES, ignores=True),
    "scores_of_vectors": Section(embedder, SCORE, reading_bodies.SOME_SCORES),
    "rankings": Section(scorer, RANK, reading_bodies.RANKINGS),
    "rankings_refused": Section(scorer, RANK, reading_bodies.WRONG_RANKINGS),
    "rankings_of_vectors": Section(embedder, RANK, reading_bodies.SOME_RANKINGS),
    "scores_told": Section(reranker, SCORE, reading_bodies.TOLD_SCORES),
    "rankings_told": Section(reranker, RANK, reading_bodies.TOLD_RANKINGS),
    "embeddings_of_states": Section(generator, EMBED, reading_bodies.STATES),
    "completions_of_an_encoder": Section(embedder, COMPLETE, {"a text": text_bodies.text()}),
    "embeddings_of_a_scorer": Section(scorer, EMBED, {"a text": reading_bodies.vectors()}),
    "scores_of_a_text_model": Section(generator, SCORE, {"a pair": reading_bodies.score()}),
}


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
