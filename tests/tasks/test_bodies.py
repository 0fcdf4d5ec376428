"""Tasks x doors: what each of seven tasks is answered through each of six doors, as bodies.json has it.

bodies.json has a section for each task and model: what is asked, and the answer at each door. Its table says for each
cell whether any body is answered, or why none is. tests/openai has many more bodies of the paths that exist.
RECORD_ANSWERS=1 (with -n 0) records what is answered now, new bodies included; the difference is then to be read.
"""

import base64
import dataclasses
import functools
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ferrum_jax import LLM
from ferrum_jax.serve.http.settings import ServerSettings
from scripts.goldens.sound_folder import write_folder
from scripts.goldens.sounds import wav
from tests.embeddings.test_classify import classifier
from tests.engine.golden_media import FAMILIES, QWEN
from tests.openai.sections import differences_of, embedder, reranker, scorer
from tests.serve.running import running, serving_llm
from tests.support import GOLDENS, INVARIANT
from tests.tasks.doors import ABSENT, DOORS, Asked, by_async_llm, by_batch, by_http, by_llm, by_ray, by_rows
from tests.transcribing.heard import CONFIG, NAME, RATE

FILE = Path(__file__).parent / "bodies.json"
RECORDS = os.environ.get("RECORD_ANSWERS") == "1"
TASKS = ("generate", "log-probabilities", "transcribe", "embed", "score", "classify", "reward")
SOUNDS = {"a.wav": wav(1, RATE, 1), "long.wav": wav(31, RATE, 1), "empty.wav": b""}  # long.wav: two windows of Whisper
# What differs from run to run: times, counters, line numbers, and what earlier requests left in the cache.
_VOLATILE = {"created", "system_fingerprint", "cached_tokens", "request_id", "line"}
Answers = dict[str, dict[str, Any]]  # of each body, by door


@functools.cache
def model(name: str, root: Path) -> LLM:
    """A small golden. root: the folder of the sounds that rows name."""
    if name == "whisper":
        sizes = {"max_num_batched_tokens": 64, "invariant": True}
        return LLM(str(GOLDENS / NAME), dataclasses.replace(CONFIG, image_root=str(root), **sizes))
    if name == "qwen3_asr":
        config = dataclasses.replace(FAMILIES[QWEN].config, image_root=str(root))
        return LLM(str(write_folder(GOLDENS, root / "model")), config)
    if name.startswith("classifier "):
        return classifier(name.removeprefix("classifier "))
    makers = {"embedder": embedder, "cross-encoder": scorer, "reranker": reranker}
    return makers[name]() if name in makers else serving_llm(INVARIANT)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sounds")
    for name, content in SOUNDS.items():
        (folder / name).write_bytes(content)
    return folder


def answers_of(section: str, root: Path, folder: Path) -> Answers:
    """What each body of a section is answered. folder: a new one, for jobs and batches."""
    task, name = section.split(": ")
    llm = model(name, root)
    asked = {body: Asked(task, answers["asked"], root) for body, answers in recorded()[section].items()}
    found: Answers = {body: dict.fromkeys(DOORS) for body in asked}
    jobs: dict[str, dict[str, Asked]] = {}  # rows, by their path
    for body, one in asked.items():
        found[body]["LLM"] = by_llm(llm, one)
        jobs.setdefault(one.path, {})[body] = one
    for place, job in enumerate(jobs.values()):
        _put(found, "rows", by_rows(llm, job, folder / f"rows-{place}"))
        _put(found, "Ray", by_ray(llm, job, folder / f"ray-{place}"))
    settings = ServerSettings(names=("small",), batches=str(folder / "batches"))
    with running(settings, inner=llm) as server:
        for body, one in asked.items():
            found[body]["AsyncLLM"] = by_async_llm(server.llm, one)
            found[body]["HTTP"] = by_http(server, one)
        for job in jobs.values():
            _put(found, "batches", by_batch(server, job))
    return {body: {door: fixed(answer) for door, answer in by_door.items()} for body, by_door in found.items()}


def _put(found: Answers, door: str, by_body: Mapping[str, Any]) -> None:
    for body, answer in by_body.items():
        found[body][door] = answer


def fixed(value: Any, name: str = "") -> Any:
    """The value as JSON, without what differs from run to run, and without lists of all known fields.

    Numbers have seven digits, as float32 has; base64 is read.
    """
    if name in _VOLATILE and value is not None:
        return 0
    if isinstance(value, Mapping):
        return {key: fixed(each, key) for key, each in value.items() if key != "num_cached_tokens"}
    if isinstance(value, list):
        return [fixed(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if name == "embedding" and isinstance(value, str):
        return {"base64": fixed(np.frombuffer(base64.b64decode(value), "<f4").tolist())}
    if not isinstance(value, str):
        return value
    short = re.sub(r"(known are|it has) [\w, ]{60,}", r"\1 ...", value)
    return re.sub(r"\bline \d+:", "line N:", re.sub(r"(?<=-)[0-9a-f]{16,}", "ID", short))


def is_close(found: float, wanted: float) -> bool:
    """Machines differ in the last digits of float32, and in a small element of a vector by those of its length, 1."""
    return math.isclose(found, wanted, rel_tol=1e-5, abs_tol=4e-6)


@functools.cache
def _read(changed_ns: int) -> dict[str, Any]:
    return json.loads(FILE.read_text())


def recorded() -> dict[str, Any]:
    """The table, then each section: what is asked by each body, and the answers, by the doors that share them."""
    return _read(FILE.stat().st_mtime_ns)


def by_door(body: Mapping[str, Any]) -> dict[str, Any]:
    """The recorded answer at each door; none where the body has not been recorded."""
    found = {door: answer for doors, answer in body.items() for door in doors.split() if doors != "asked"}
    return {door: found[door] for door in DOORS if door in found}


def record(section: str, found: Answers) -> None:
    """Rewrites a section and the table, with a line for each answer, which doors that answer alike share."""
    sections = {name: bodies for name, bodies in recorded().items() if name != "table"}
    asked = {body: {"asked": answers["asked"]} for body, answers in sections[section].items()}
    sections[section] = {body: asked[body] | _shared(answers) for body, answers in found.items()}
    parts = [f'"table": {_lines(table_of(sections))}']
    for name, bodies in sections.items():
        parts.append(f"{json.dumps(name)}: {{\n")
        parts[-1] += ",\n".join(f" {json.dumps(body)}: {_lines(answers)}" for body, answers in bodies.items()) + "\n}"
    FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def _lines(value: Mapping[str, Any]) -> str:
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(each, ensure_ascii=False)}" for key, each in value.items())
    return f"{{\n{lines}\n }}"


def _shared(answers: Mapping[str, Any]) -> dict[str, Any]:
    doors: dict[str, list[str]] = {}
    for door in DOORS:
        doors.setdefault(json.dumps(answers[door]), []).append(door)
    return {" ".join(same): json.loads(answer) for answer, same in doors.items()}


def table_of(sections: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """By task and door: whether any body is answered, or the sentence of the first refusal, or ABSENT."""
    answers: dict[str, dict[str, list[Any]]] = {task: {door: [] for door in DOORS} for task in TASKS}
    for name, bodies in sections.items():
        for body in bodies.values():
            for door, answer in by_door(body).items():
                answers[name.split(": ")[0]][door].append(answer)
    return {task: {door: _cell(each) for door, each in cells.items()} for task, cells in answers.items()}


def _cell(answers: list[Any]) -> str:
    if any(answer != ABSENT and "refused" not in answer for answer in answers):
        return "answers"
    said = [answer["refused"]["message"] for answer in answers if answer != ABSENT]
    return f"refuses: {said[0]}" if said else ABSENT


@pytest.mark.parametrize("section", [name for name in recorded() if name != "table"])
def test_tasks_are_answered_as_recorded(section, root, tmp_path):
    found = answers_of(section, root, tmp_path)
    if RECORDS:
        record(section, found)
    wanted = {body: by_door(answers) for body, answers in recorded()[section].items()}
    differences = list(differences_of(found, wanted, section, is_close))
    assert not differences, "\n".join(differences)


def test_the_table_says_of_every_task_and_door_what_is_recorded():
    table, *sections = recorded()
    assert table == "table" and recorded()[table] == table_of({name: recorded()[name] for name in sections})
    assert {name.split(": ")[0] for name in sections} == {*TASKS}, "a task is asked of no model"
