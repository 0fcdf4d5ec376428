"""TokenRules: which tokens a request itself allows and forbids, beside its grammar.

`allowed_token_ids`, `bad_words`, a logit_bias of minus infinity, end tokens before min_tokens, and what is no
transcript: all are taken out of the mask on the host, where it is known whether anything is left.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from ferrum_jax.inputs.params.transcript import Transcript
from ferrum_jax.sampling_params import SamplingParams


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


class Encodes(Protocol):
    """The part of a tokenizer that bad words need."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...


class TokenRules:
    """The rules of one request; equal for all its choices."""

    def __init__(self, sampling: SamplingParams, stop_ids: frozenset[int], encodes: Encodes | None) -> None:
        """stop_ids: which may not come before min_tokens. Raises ValueError for bad_words without a tokenizer."""
        self._stop_ids = stop_ids
        self._min_tokens = sampling.min_tokens
        self._never = [token for token, bias in (sampling.logit_bias or {}).items() if bias == -math.inf]
        self._allowed = None if sampling.allowed_token_ids is None else sorted(set(sampling.allowed_token_ids))
        self._bad = _sequences(sampling.bad_words, encodes)
        self._bad_after: dict[int, list[tuple[int, ...]]] = {}  # by the token before their last
        for bad in self._bad:
            if len(bad) > 1:
                self._bad_after.setdefault(bad[-2], []).append(bad)
        self._transcript = None if sampling.transcript is None else TranscriptRules(sampling.transcript)
        self._always: np.ndarray | None = None  # the mask of what may come wherever it comes, once its size is known

    @property
    def say_nothing(self) -> bool:
        """Whether they leave every mask as it is."""
        is_free = self._allowed is None and self._transcript is None
        return is_free and not (self._never or self._bad or self._min_tokens)

    def narrow(self, mask: np.ndarray, output: Sequence[int]) -> str | None:
        """Takes out of a mask [words] int32 what the rules forbid after `output`; an error where nothing is left.

        A text that must end ends before min_tokens: its grammar allows no more.
        """
        if self._always is None:
            self._always = self._made_always(mask)
        mask &= self._always
        if self._transcript is not None and (error := self._transcript.narrow(mask, output)) is not None:
            return error
        forbid(mask, self._completing(output))
        if not mask.any():
            return f"{' and '.join(self._named())} forbid every token that may come here"
        if len(output) < self._min_tokens:
            longer = mask.copy()
            forbid(longer, self._stop_ids)
            if longer.any():
                mask[:] = longer
        return None

    def _made_always(self, mask: np.ndarray) -> np.ndarray:
        """The mask of the tokens that are allowed whatever came before: made once, whose lists may be long."""
        always = np.full_like(mask, -1) if self._allowed is None else np.zeros_like(mask)
        allow(always, self._allowed or ())
        forbid(always, [*self._never, *(bad[0] for bad in self._bad if len(bad) == 1)])
        return always

    def _completing(self, output: Sequence[int]) -> list[int]:
        """The tokens that would complete a bad word of several."""
        return [
            bad[-1]
            for bad in (self._bad_after.get(output[-1], ()) if len(output) else ())
            if len(output) >= len(bad) - 1 and tuple(output[1 - len(bad) :]) == bad[:-1]
        ]

    def _named(self) -> list[str]:
        named = {"allowed_token_ids": self._allowed, "bad_words": self._bad, "logit_bias": self._never}
        return [name for name, given in named.items() if given]


def allow(mask: np.ndarray, tokens: Sequence[int]) -> None:
    """Allows the tokens too."""
    ids = np.asarray(tokens, np.int64)
    np.bitwise_or.at(mask.view(np.uint32), ids // 32, np.left_shift(1, ids % 32).astype(np.uint32))


def forbid(mask: np.ndarray, tokens: Iterable[int]) -> None:
    """Forbids the tokens."""
    words = mask.view(np.uint32)
    for token in tokens:
        words[token // 32] &= ~np.uint32(1 << token % 32)


def _sequences(bad_words: Sequence[str], encodes: Encodes | None) -> list[tuple[int, ...]]:
    """The tokens of each bad word, at the beginning of a text and after a space.

    Source: vLLM, SamplingParams.bad_words: the last token of a word is forbidden where those before it have come.
    """
    if not bad_words:
        return []
    if encodes is None:
        raise ValueError("bad_words needs a tokenizer; use logit_bias, or give LLM(tokenizer=...)")
    found: dict[tuple[int, ...], None] = {}
    for word in bad_words:
        plain = tuple(encodes.encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(encodes.encode(f" {word.lstrip()}", add_special_tokens=False))
        found[plain] = None
        if len(spaced) == len(plain):  # else the space is a token of its own, before the same word
            found[spaced] = None
    return list(found)
