"""Matcher: how far a row is in its grammar, and which tokens may come next.

Its state is a function of the tokens alone: fed the same ones, a fresh matcher allows the same, so a row that was
preempted or resumed in another process goes on as if it had never stopped. Tokens come one by one as steps are
committed. Where the model thinks first, the grammar begins after the tokens that end the thinking.
"""

from __future__ import annotations

import itertools
import random
import re
import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ferrum_jax.text.structured.token_rules import allow
from ferrum_jax.text.structured.vocabulary import Vocabulary

if TYPE_CHECKING:
    import llguidance

MIN_FORCED = 2  # tokens that are worth a chunk; a single one is drawn
STUCK = "the grammar allows no token here: what it demands cannot be written"
_MAX_DRAWN = 8
_SHOWN = 400  # characters of an error
_MARK = re.compile(r"\n?<(state|non-verbose)")  # what follows is the compiler's own state


class Matcher:
    """The state of one row in its grammar.

    error: why the row can go no further, or None.
    """

    def __init__(
        self, vocabulary: Vocabulary, state: llguidance.LLMatcher, *, begins_after: Sequence[int] = ()
    ) -> None:
        """state: this row's own, where its grammar begins. begins_after: tokens that end the thinking before it."""
        self.vocabulary = vocabulary
        self._state = state
        self._begins_after = tuple(begins_after)
        self._tokens: list[int] = []  # all that it took
        self._start: int | None = None if begins_after else 0  # of them, the first one of the grammar
        self._has_ended = False
        self.error: str | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the grammar says what comes next; before that, everything is allowed."""
        return self._start is not None

    @property
    def may_end(self) -> bool:
        """Whether the text so far is a whole one of its grammar."""
        return self._has_ended or (self.has_begun and self._state.is_accepting())

    @property
    def must_end(self) -> bool:
        """Whether only an end token may come."""
        return self.has_begun and self._state.is_stopped() and not self._state.is_error()

    def advance(self, token: int) -> bool:
        """Takes the next token; False, with `error` set, where the grammar does not allow it."""
        if self.error is not None:
            return False
        if self.has_begun and not self._take(token):
            if token < self.vocabulary.size and self._state.is_error():  # a limit, or a lexer that went too far
                self._note_failure()
                return False
            text = self.vocabulary.tokens.dbg_tokens([token]) if token < self.vocabulary.size else "padding"
            self.error = f"the grammar does not allow token {token} ({text}) here"
            return False
        self._tokens.append(token)
        if not self.has_begun and tuple(self._tokens[-len(self._begins_after) :]) == self._begins_after:
            self._start = len(self._tokens)
        return True

    def _take(self, token: int) -> bool:
        """Whether the grammar goes on with the token."""
        if self._has_ended:
            return False
        if token in self.vocabulary.end_ids and self._state.is_accepting():
            self._has_ended = True
            return True
        return self._state.try_consume_tokens([token]) == 1

    def replay(self, tokens: Sequence[int], *, forces: bool = True) -> bool:
        """Takes tokens that came before; False, with `error` set, at the first that is not allowed.

        forces: whether the row has what is forced without drawing it. Such tokens are taken in one piece; the mask
        before each of the others is made, as it was when it was drawn. So each step has the work that it had then,
        and the limits of a step, which count work, end a row where they would have ended it.
        """
        scratch = self.vocabulary.blank_masks(1)[0]
        place = 0
        while place < len(tokens):
            forced = self.forced() if forces else []
            if len(forced) >= MIN_FORCED:
                pairs = zip(forced, itertools.islice(tokens, place, None), strict=False)
                came = [token for token, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
                if not self.take_forced(came):
                    return False
                place += len(came)
                if len(came) == len(forced) or place == len(tokens):
                    continue
            if (self.has_begun and not self.fill(scratch)) or not self.advance(tokens[place]):
                return False
            place += 1
        return True

    def take_forced(self, tokens: Sequence[int]) -> bool:
        """Takes a beginning of what is forced now, with no mask between; False, with `error` set, where it cannot."""
        count = self._state.try_consume_tokens(list(tokens)) if tokens else 0
        self._tokens += tokens[:count]
        return count == len(tokens) or self.advance(tokens[count])

    def copy(self) -> Matcher:
        """Gives one that is as far in its grammar; what it takes from here on leaves no trace in this one."""
        made = Matcher(self.vocabulary, self._state.deep_copy(), begins_after=self._begins_after)
        made._tokens, made._start, made._has_ended = list(self._tokens), self._start, self._has_ended
        made.error = self.error
        return made

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """How many of the first tokens may come: before the grammar begins, all may but the end tokens.

        Ids beyond the tokenizer's, which a model may draft, never may once it has begun: the library fails on them.
        """
        if self.error is not None or self._has_ended:
            return 0
        if self.has_begun:
            return self._state.validate_tokens(list(itertools.takewhile(lambda i: i < self.vocabulary.size, tokens)))
        return sum(1 for _ in itertools.takewhile(lambda token: token not in self.vocabulary.end_ids, tokens))

    def fill(self, mask: np.ndarray) -> bool:
        """Sets a bit for each token that may come next: `mask` [words] int32. False, with `error` set, if none may."""
        own = mask[: self.vocabulary.own_words]
        self._state.unsafe_compute_mask_ptr(own.ctypes.data, own.nbytes)
        mask[self.vocabulary.own_words :] = 0
        return self._keep_mask(mask, int(np.count_nonzero(mask)))

    def _keep_mask(self, mask: np.ndarray, num_words: int) -> bool:
        """Notes why a row is stuck, if its mask shows that. Returns whether the row can go on.

        num_words: of the mask that are not zero.
        """
        if self._state.is_error():
            self._note_failure()
        elif num_words == 0:
            self.error = STUCK
        elif num_words == 1:
            self._spell(mask)
        return self.error is None

    def _spell(self, mask: np.ndarray) -> None:
        """Replaces the one token of a mask, where the grammar does not take it, by the longest that begins the text.

        The library asks the tokenizer how forced text begins. That may be an added token, which no grammar takes as
        text, or a token of other text than it was given, where the tokenizer changes texts.
        """
        word = int(np.flatnonzero(mask)[0])
        bits = int(mask[word]) & 0xFFFFFFFF
        token = 32 * word + bits.bit_length() - 1
        if bits & (bits - 1) or token in self.vocabulary.end_ids or self._state.validate_tokens([token]):
            return
        mask[word] = 0
        text = self._state.compute_ff_bytes().decode(errors="ignore")
        allow(mask, self.vocabulary.tokens.greedy_tokenize(text)[:1])

    def forced(self) -> list[int]:
        """The tokens that must come now, as the tokenizer would write them; none where there is a choice."""
        if not self.has_begun or self.error is not None or self._has_ended:
            return []
        tokens = self._state.compute_ff_tokens()
        return tokens[: self._state.validate_tokens(tokens)] if tokens else []

    def _note_failure(self) -> None:
        text = without_state(self._state.get_error())
        is_stuck = not text or text.startswith("NoExtension")
        if "Current row has" in text:  # properties may come in any order, so each is one that may come next
            text = f"the grammar lets too much come next; say fewer properties or alternatives ({text})"
        self.error = self.error or (STUCK if is_stuck else text[:_SHOWN])


def without_state(error: str) -> str:
    """The library's message without its own state behind it."""
    return _MARK.split(error)[0].strip()


def fill_all(vocabulary: Vocabulary, matchers: Sequence[Matcher], masks: np.ndarray) -> None:
    """Writes the mask of each matcher, whose grammar has begun, into its row of `masks` [n, words] int32, in threads.

    A matcher that allows nothing has its `error` set.
    """
    is_whole = vocabulary.own_words == masks.shape[1] and masks.flags.c_contiguous
    own = masks if is_whole else np.zeros((len(matchers), vocabulary.own_words), np.int32)
    states = [(matcher._state, row) for row, matcher in enumerate(matchers)]
    vocabulary.executor.unsafe_compute_mask_ptr(states, own.ctypes.data, own.shape[1] * 4, len(own))
    if not is_whole:
        masks[:, : own.shape[1]], masks[:, own.shape[1] :] = own, 0
    for matcher, mask, num_words in zip(matchers, masks, np.count_nonzero(own, axis=1).tolist(), strict=True):
        matcher._keep_mask(mask, num_words)


def tried(matcher: Matcher, seed: int, *, most: int) -> str | None:
    """The limit that a text drawn at random meets within `most` tokens; None where it meets none, or ends before."""
    mask = matcher.vocabulary.blank_masks(1)[0]
    drawing = random.Random(seed)
    for _ in range(most):
        if not matcher.fill(mask):
            return None if matcher.error == STUCK else matcher.error
        token = _any_of(mask, drawing, matcher.vocabulary.end_ids)
        if token is None or not matcher.advance(token):
            return matcher.error
    return None


def _any_of(mask: np.ndarray, drawing: random.Random, ends: Collection[int]) -> int | None:
    """A token of a mask that does not end a text; None where there is none."""
    words = np.flatnonzero(mask)
    for _ in range(_MAX_DRAWN):
        word = int(drawing.choice(words))
        bits = int(mask[word]) & 0xFFFFFFFF
        token = 32 * word + drawing.choice([bit for bit in range(32) if bits >> bit & 1])
        if token not in ends:
            return token
    return None


def all_forced(matcher: Matcher, most: int = sys.maxsize, ends: Collection[int] = ()) -> list[int]:
    """The tokens that must come now, which the matcher has taken then; none where they are too few.

    They are `most` at most, and those before the first of `ends`.
    """
    found: list[int] = []
    while len(tokens := matcher.forced()) >= MIN_FORCED:
        kept = list(itertools.takewhile(lambda token: token not in ends, tokens))[: most - len(found)]
        if not matcher.take_forced(kept):
            break
        found += kept
        if len(kept) < len(tokens):
            break
    return found
