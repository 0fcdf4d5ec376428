"""What holds of every source of drafts."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tracemalloc

import pytest

from tests.speculation.naive import request_of
from tests.speculation.sources import SOURCES, history
from tests.support import ROOT


def test_drafts_are_equal_in_every_process():
    program = "from tests.speculation.sources import *; print([history(SOURCES[name]()) for name in SOURCES])"
    env = {**os.environ, "PYTHONHASHSEED": "77"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str([history(SOURCES[name]()) for name in SOURCES])


@pytest.mark.parametrize("source", SOURCES)
def test_drafts_are_of_the_asked_length_with_confidences(source):
    said = history(SOURCES[source]())
    assert any(token_ids for token_ids, _ in said)
    for token_ids, confidences in said:
        assert len(token_ids) == len(confidences) <= 8
        assert set(token_ids) <= set(range(4)) and all(0 < c <= 1 for c in confidences)


@pytest.mark.parametrize("source", SOURCES)
def test_a_preempted_request_goes_on_as_if_it_had_not_been(source):
    """It keeps its Request; steps in which it does not run ask for no draft."""
    drafts, always = SOURCES[source](), SOURCES[source]()
    rng = random.Random(1)
    one, twin = request_of(1, [1, 2, 3]), request_of(1, [1, 2, 3])
    for step in range(100):
        token = rng.randrange(3)
        one.token_ids.append(token)
        twin.token_ids.append(token)
        expected = always.propose(twin, 8)
        if step % 30 < 20:
            assert drafts.propose(one, 8) == expected


@pytest.mark.parametrize("source", SOURCES)
def test_bytes_is_what_is_allocated(source):
    rng = random.Random(2)
    requests = [request_of(id, [rng.randrange(50_000) for _ in range(1500)]) for id in range(40)]
    tracemalloc.start()
    drafts = SOURCES[source]()
    for request in requests:
        drafts.propose(request, 4)
    traced, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.9 * traced < drafts.bytes < 1.1 * traced
