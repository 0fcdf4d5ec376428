"""Results: the tokens that a step drew, appended to the requests that still want them."""

from __future__ import annotations

import numpy as np

from ferrum_jax.request import Request


def append_tokens(
    requests: list[Request],
    samples: np.ndarray,
    current: np.ndarray,
    token_ids: np.ndarray,
    awaited: set[int],
    first: int = 0,
) -> list[tuple[Request, int]]:
    """Append the rows' tokens to the requests that still want them, and mark those that end by theirs.

    samples, current, token_ids: [rows]; whether a row drew a token, whether its request still runs as the admission
    that the step was planned for, and the token. awaited: ids of preempted requests whose token this may be.
    Returns the requests that got a token, each with its row, counted from `first` on.
    """
    got = []
    rows = zip(requests, samples.tolist(), current.tolist(), token_ids.tolist(), strict=True)
    for row, (request, draws, is_current, token) in enumerate(rows, first):
        if not draws:
            continue
        if not is_current:
            if request.id not in awaited:
                continue  # it ended while this step was in flight
            awaited.remove(request.id)
        ids = request.token_ids
        ids.append(token)
        if token in request.stop_ids and len(ids) - request.num_prompt_tokens > request.min_tokens:
            request.finish_reason, request.stop_reason = "stop", token
        elif len(ids) >= request.max_total_tokens:
            request.finish_reason = "length"
        got.append((request, row))
    return got
