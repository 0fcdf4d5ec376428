"""The sources of drafts, and a history of requests to ask them about."""

import random

from ferrum_jax.core.drafts.drafts import Drafts
from ferrum_jax.core.drafts.ngram import NgramDrafts
from ferrum_jax.core.drafts.suffix import SuffixDrafts
from tests.speculation.naive import request_of

SOURCES = {"ngram": lambda: NgramDrafts(1, 4), "suffix": lambda: SuffixDrafts(32, 100, 2.0, 0.1)}


def history(drafts: Drafts) -> list[tuple]:
    """The drafts of some requests that run, end, and follow one another."""
    rng = random.Random(5)
    said = []
    requests = [request_of(id, [rng.randrange(4) for _ in range(60)], num_prompt=20) for id in range(6)]
    for step in range(60):
        for request in requests:
            request.token_ids.append(rng.randrange(4))
            draft = drafts.propose(request, 8)
            said.append((list(draft.token_ids), list(draft.confidences)))
        if step % 10 == 9:
            drafts.forget(requests[0])
            requests[0] = request_of(100 + step, requests[0].token_ids[:30])
    return said
