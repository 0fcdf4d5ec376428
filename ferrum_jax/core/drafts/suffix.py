"""SuffixDrafts: a request goes on as texts did in which its last tokens stood before.

*Which texts.* The request's own, prompt and generated tokens, always. From requests of the same cache_salt: what the
running ones generated, and all that finished and learnt texts hold. A running request's prompt is read by itself alone.
Adapters are not told apart: a draft cannot change a result.

*Which places.* Grams of 8, 4, 2 and 1 tokens are looked up in that order, in the own text and in the shared ones; the
longest that occurs decides. Its newest places, 6 from each side at most, are compared further back, max_tree_depth
tokens at most; those with the longest match are kept. So no match is longer, unless its last 8 tokens occur more often
than that. A lookup passes 32 places of a hash bucket at most, whoever's they are, so its cost has a bound.

*Which tokens.* Step by step, the token that follows at most of these places; among equals, the one at the newest place,
the own text first. Its confidence is that share; places that go on otherwise drop out. The draft ends before the
product of its confidences falls below min_token_prob, and at max_spec_factor times the length of the match. The own
text goes on with the draft itself, so that a repetition continues.

*Bounds.* A running request takes 32 to 80 bytes per token, and 5 KB. The shared index has max_cached_tokens places, 40
bytes each, rounded up to a power of two; a place is a token that some text went on with, and the oldest is given out
again. It keeps max_cached_requests finished texts and max_cached_tokens of their tokens, 4 bytes each; the oldest
go first.
Source: SuffixDecoding (Oliaro et al. 2024), whose suffix tree this index replaces.
"""

import dataclasses
import hashlib
from array import array
from collections.abc import Sequence

from ferrum_jax.core.drafts.drafts import NO_DRAFT, Draft
from ferrum_jax.core.drafts.own_grams import OwnGrams
from ferrum_jax.core.drafts.shared_grams import SharedGrams, SharedText
from ferrum_jax.core.drafts.suffix_matches import Match, follow, longest
from ferrum_jax.core.request import Request

GRAMS = (1, 2, 4, 8)
MAX_PLACES = 6


@dataclasses.dataclass(kw_only=True, slots=True)
class _Running:
    own: OwnGrams
    shared: SharedText


class SuffixDrafts:
    """Drafts from what followed the longest match of a request's last tokens, by how often it did."""

    def __init__(
        self,
        max_tree_depth: int,
        max_cached_requests: int,
        max_spec_factor: float,
        min_token_prob: float,
        *,
        max_cached_tokens: int = 1 << 20,
    ) -> None:
        """max_tree_depth: tokens of a match that are told apart. max_cached_requests: finished texts that are kept,
        max_cached_tokens: their tokens, and the places of the shared index. max_spec_factor: tokens drafted for each
        token of the match. min_token_prob: how likely, as estimated, the whole of a draft is at least.
        """
        if max_tree_depth < 1 or max_cached_requests < 0 or max_spec_factor < 0 or not 0 <= min_token_prob <= 1:
            raise ValueError(
                f"max_tree_depth is {max_tree_depth}, max_cached_requests {max_cached_requests}, max_spec_factor "
                f"{max_spec_factor}, min_token_prob {min_token_prob}; the depth is 1 or more, the probability 0 to 1, "
                "the others 0 or more"
            )
        self._depth = max_tree_depth
        self._spec_factor = max_spec_factor
        self._min_prob = min_token_prob
        self._lengths = [length for length in GRAMS if length <= max_tree_depth]
        self._shared = SharedGrams(self._lengths, max_cached_requests, max_cached_tokens)
        self._running: dict[int, _Running] = {}  # by request id

    def propose(self, request: Request, most: int) -> Draft:
        """Up to `most` tokens, fewer where texts disagree or the match is short."""
        running, tokens = self._taken_in(request), request.token_ids
        own, shared = running.own.newest(), self._shared.newest(running.shared)
        for level in reversed(range(len(shared))):
            matches: list[Match] = []
            if own[level]:
                matches = [(tokens, at) for at in running.own.earlier(level, own[level], MAX_PLACES)]
            if shared[level]:
                matches += self._shared.positions(running.shared, level, shared[level], MAX_PLACES)
            if matches:
                length, kept = longest(matches, tokens, self._lengths[level], self._depth)
                limit = int(min(most, self._spec_factor * length))
                token_ids, confidences = follow(kept, tokens, limit, self._min_prob)
                return Draft(token_ids=token_ids, confidences=confidences) if token_ids else NO_DRAFT
        return NO_DRAFT

    def forget(self, request: Request) -> None:
        """Moves the text of a request to the finished ones."""
        running = self._taken_in(request)
        del self._running[request.id]
        self._shared.finish(running.shared)

    def learn(self, token_ids: Sequence[int], num_prompt_tokens: int, salt: bytes) -> None:
        """Takes in a text as if a request had just finished with it."""
        text = self._shared.open(array("i", token_ids), num_prompt_tokens, _seed(salt))
        self._shared.take_in(text, [])
        self._shared.finish(text)

    @property
    def bytes(self) -> int:
        return self._shared.bytes + sum(running.own.bytes for running in self._running.values())

    def _taken_in(self, request: Request) -> _Running:
        """The books about a request, up to its last token."""
        running = self._running.get(request.id)
        if running is None:
            tokens = request.token_ids
            shared = self._shared.open(tokens, request.num_prompt_tokens, _seed(request.cache_salt))
            running = _Running(own=OwnGrams(self._lengths, tokens), shared=shared)
            self._running[request.id] = running
        if running.own.num_taken < len(request.token_ids):
            self._shared.take_in(running.shared, running.own.take_in())
        return running


def _seed(salt: bytes) -> int:
    """A number for a salt, equal in every process."""
    return int.from_bytes(hashlib.blake2b(salt, digest_size=8).digest(), "little")
