"""TranscriptRules: the tokens that may come next where a model writes down what it hears."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ferrum_jax.inputs.params.transcript import Transcript


class TranscriptRules:
    """The rules of one request. What they allow is a function of the tokens so far alone."""

    def __init__(self, asked: Transcript) -> None:
        self._asked = asked
        self._suppressed: np.ndarray | None = None  # once the mask's size is known

    def narrow(self, mask: np.ndarray, output: Sequence[int]) -> str | None:
        """Takes out of a mask [words] int32 what may not come after `output`; an error where nothing is left."""
        asked, place = self._asked, len(output)
        leading = [asked.languages] * bool(asked.languages) + [(token,) for token in asked.then]
        if place < len(leading):
            mask &= _of(leading[place], mask)
        else:
            self._narrow_text(mask, output[len(leading) :])
        return None if mask.any() else "the rules of a transcript leave no token that may come here"

    def _narrow_text(self, mask: np.ndarray, text: Sequence[int]) -> None:
        asked = self._asked
        if self._suppressed is None:
            self._suppressed = ~_of(asked.suppressed, mask)
        mask &= self._suppressed
        if not text:
            mask &= ~_of(asked.suppressed_first, mask)
        if asked.stamps_from is not None:
            self._narrow_stamps(mask, text, asked.stamps_from)

    def _narrow_stamps(self, mask: np.ndarray, text: Sequence[int], first: int) -> None:
        """Times come in pairs and never go back; the text begins with one."""
        if not text:
            most = self._asked.most_first_stamp
            mask &= ~_below(first, mask)
            mask &= mask if most is None else _below(first + most + 1, mask)
            return
        is_stamp = [token >= first for token in text[-2:]]
        last_is, one_before_is = is_stamp[-1], len(text) < 2 or is_stamp[0]
        if last_is and one_before_is:
            mask &= _below(first, mask)
        elif last_is:
            mask &= ~_below(self._asked.end_id, mask)
        stamps = [token for token in text if token >= first]
        if stamps:
            earliest = stamps[-1] if last_is and not one_before_is else stamps[-1] + 1
            mask &= _below(first, mask) | ~_below(earliest, mask)


def _of(tokens: Sequence[int], like: np.ndarray) -> np.ndarray:
    """The mask [words] int32 of these tokens."""
    made = np.zeros_like(like)
    ids = np.asarray(tokens, np.int64)
    np.bitwise_or.at(made.view(np.uint32), ids // 32, np.left_shift(1, ids % 32).astype(np.uint32))
    return made


def _below(token: int, like: np.ndarray) -> np.ndarray:
    """The mask [words] int32 of all tokens below this one."""
    made = np.zeros_like(like)
    made[: token // 32] = -1
    if token % 32 and token // 32 < len(made):
        made.view(np.uint32)[token // 32] = (1 << token % 32) - 1
    return made
