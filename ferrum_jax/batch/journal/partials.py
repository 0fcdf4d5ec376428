"""A row in progress as bytes: its choices' tokens so far and their log-probabilities, to go on from.

Its images are kept as digests: their bytes stand in the input, or where its URLs lead.
"""

import json
from collections.abc import Sequence

from ferrum_jax.core.outputs import CompletionOutput, Logprob


def encode_partial(choices: Sequence[CompletionOutput]) -> bytes:
    """One line without its newline. Floats keep all their bits."""
    return json.dumps([_encode_choice(choice) for choice in choices], separators=(",", ":")).encode()


def decode_partial(content: bytes) -> tuple[CompletionOutput, ...]:
    return tuple(_decode_choice(index, *fields) for index, fields in enumerate(json.loads(content)))


def _encode_choice(choice: CompletionOutput) -> list[object]:
    logprobs = choice.logprobs and [[[t, p.logprob, p.rank] for t, p in entry.items()] for entry in choice.logprobs]
    text = choice.text if choice.finish_reason is not None else ""  # of one that goes on it is made again
    images = [list(choice.image_digests)] if choice.image_digests else []
    return [list(choice.token_ids), logprobs, text, choice.finish_reason, choice.stop_reason, *images]


def _decode_choice(
    index: int,
    token_ids: Sequence[int],
    logprobs: Sequence[Sequence[tuple[int, float, int]]] | None,
    text: str,
    finish_reason: str | None,
    stop_reason: int | str | None,
    image_digests: Sequence[str] = (),
) -> CompletionOutput:
    entries = None
    if logprobs is not None:
        entries = tuple({t: Logprob(logprob=p, rank=rank) for t, p, rank in entry} for entry in logprobs)
    return CompletionOutput(
        index=index,
        text=text,
        token_ids=tuple(token_ids),
        cumulative_logprob=None,
        logprobs=entries,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        image_digests=tuple(image_digests),
    )
