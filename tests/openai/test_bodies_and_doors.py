"""Bodies x doors: what each body is answered through each door, as it is recorded in answers/.

RECORD_ANSWERS=1 records what is answered now; the difference in answers/ is then to be read.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from ferrum_jax.serve.http.settings import ServerSettings
from tests.openai.doors import by_call, by_job, over_http, streamed
from tests.openai.sections import ANSWERS, RESPOND, SECTIONS, Answers, differences_of, record, recorded
from tests.serve.running import running

RECORDS = os.environ.get("RECORD_ANSWERS") == "1"


def answers(name: str) -> Answers:
    """What each body of a section is answered, by door. A door that has no such path or argument is left out."""
    section = SECTIONS[name]
    llm, path = section.make(), section.path
    found: dict[str, dict[str, Any]] = {each: {} for each in section.bodies}
    settings = ServerSettings(names=("small",), max_n=8, max_prompts=16, ignore_unknown_fields=section.ignores)
    if not section.ignores and path != RESPOND:
        for each, body in section.bodies.items():
            if (said := by_call(llm, path, body)) is not None:
                found[each]["call"] = said
        with tempfile.TemporaryDirectory() as folder:
            for each, said in by_job(llm, path, section.bodies, Path(folder, "job")).items():
                found[each]["job"] = said
    with running(settings, inner=llm) as server:
        for each, body in section.bodies.items():
            if not section.ignores and (said := by_call(server.llm, path, body)) is not None:
                found[each]["async"] = said
            if body.get("stream") is not True or not section.generates:
                found[each]["http"] = over_http(server, path, body)
            if section.generates:
                found[each]["stream"] = streamed(server, path, body)
    if RECORDS:
        record(name, found)
    return found


@pytest.mark.parametrize("name", SECTIONS)
def test_bodies_are_answered_as_recorded(name):
    found, wanted = answers(name), recorded(name)
    assert list(found) == list(wanted), "bodies came or went; record them"
    differences = []
    for body, by_door in wanted.items():
        in_order = {door: found[body][door] for door in by_door if door in found[body]} | found[body]
        differences += [f"{body}: {each}" for each in differences_of(in_order, by_door)]
    assert not differences, "\n".join(differences)


def test_no_answer_is_recorded_of_a_body_that_is_gone():
    assert {path.stem for path in ANSWERS.iterdir()} == set(SECTIONS)
    for name, section in SECTIONS.items():
        assert list(recorded(name)) == list(section.bodies)
