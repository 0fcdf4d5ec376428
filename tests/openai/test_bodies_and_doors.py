"""Bodies x doors: what each body is answered through each door, as it is recorded in answers/.

RECORD_ANSWERS=1 records what is answered now; the difference in answers/ is then to be read.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ferrum_jax import LLM, EngineConfig
from ferrum_jax.serve.http.settings import ServerSettings
from tests.openai import chat_bodies, reading_bodies, text_bodies
from tests.openai.doors import Bodies, by_call, by_job, over_http, streamed
from tests.serve.running import running, serving_llm
from tests.support import COMPILED, GOLDENS

ANSWERS = Path(__file__).parent / "answers"
COMPLETE, CHAT, RESPOND = "/v1/completions", "/v1/chat/completions", "/v1/responses"
EMBED, SCORE, RANK = "/v1/embeddings", "/v1/score", "/v1/rerank"
TOLERANCE = 1e-4  # of a log-probability or a number of a vector, as in tests/engine
RECORDS = os.environ.get("RECORD_ANSWERS") == "1"


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


class Section(NamedTuple):
    """Bodies of one path, asked of one model. ignores: by a server that ignores unknown fields."""

    make: Any
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
}


@functools.cache
def answers(name: str) -> Mapping[str, Mapping[str, Any]]:
    """What each body of a section is answered, by door. A door that has no such path or argument is left out."""
    section = SECTIONS[name]
    llm, path, found = section.make(), section.path, {each: {} for each in section.bodies}
    settings = ServerSettings(names=("small",), max_n=8, max_prompts=16, ignore_unknown_fields=section.ignores)
    if not section.ignores and path != RESPOND:
        for each, body in section.bodies.items():
            if (said := by_call(llm, path, body)) is not None:
                found[each]["call"] = said
        with tempfile.TemporaryDirectory() as folder:
            for each, said in by_job(llm, path, section.bodies, Path(folder, "job")).items():
                found[each]["job"] = said
    with running(settings, **({"inner": llm} if section.make is generator else {"encoder": llm})) as server:
        for each, body in section.bodies.items():
            if body.get("stream") is not True:
                found[each]["http"] = over_http(server, path, body)
            if section.generates:
                found[each]["stream"] = streamed(server, path, body)
    if RECORDS:
        record(name, found)
    return found


def record(name: str, found: Mapping[str, Mapping[str, Any]]) -> None:
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
def recorded(name: str) -> Mapping[str, Mapping[str, Any]]:
    found = json.loads((ANSWERS / f"{name}.json").read_text())
    return {
        each: {door: value for doors, value in by_door.items() for door in doors.split()}
        for each, by_door in found.items()
    }


@pytest.mark.parametrize("name", SECTIONS)
def test_bodies_are_answered_as_recorded(name):
    found, wanted = answers(name), recorded(name)
    assert list(found) == list(wanted), "bodies came or went; record them"
    differences = []
    for body, by_door in wanted.items():
        differences += [f"{body}: {each}" for each in differences_of(found[body], by_door)]
    assert not differences, "\n".join(differences)


def differences_of(found: Any, wanted: Any, place: str = "") -> Iterator[str]:
    """Where keys in their order, texts or whole numbers are not the same, or other numbers not nearly so."""
    if isinstance(wanted, dict) and isinstance(found, dict) and list(found) == list(wanted):
        for key in wanted:
            yield from differences_of(found[key], wanted[key], f"{place}.{key}")
    elif isinstance(wanted, list) and isinstance(found, list) and len(found) == len(wanted):
        for index, each in enumerate(wanted):
            yield from differences_of(found[index], each, f"{place}[{index}]")
    elif isinstance(wanted, float) and isinstance(found, float):
        if abs(found - wanted) > TOLERANCE:
            yield f"{place} is {found}, and {wanted} is recorded"
    elif type(found) is not type(wanted) or found != wanted:
        yield f"{place} is {found!r}, and {wanted!r} is recorded"


def test_no_answer_is_recorded_of_a_body_that_is_gone():
    assert {path.stem for path in ANSWERS.iterdir()} == set(SECTIONS)
    for name, section in SECTIONS.items():
        assert list(recorded(name)) == list(section.bodies)
