"""Drafting: which drafted tokens the rows of a step compute beside those that they know.

A drafted token is kept where the model draws the same one, so drafts change no text, only how many steps it takes. The
step draws at each place with that place's own key. Each row's drafts come true at a rate that is counted whether they
are computed or not; the tokens that are likeliest to come true are computed, as many as pay by the costs of steps. On
the host a step with drafts is committed before the next one is planned. Nothing here reads a clock: costs are told.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from ferrum_jax.core.drafts.drafts import Drafts
from ferrum_jax.core.drafts.make_drafts import make_drafts
from ferrum_jax.core.drafts.mtp_drafts import UNKNOWN, MtpDrafts
from ferrum_jax.core.metrics import SpeculationCounts
from ferrum_jax.core.request import Request
from ferrum_jax.inputs.sizes.engine_sizes import EngineSizes

_MIN_GAIN = 1.1  # tokens a second, over those without drafts
_MIN_CHANCE = 0.05  # of a token that is computed
_SELDOM = 4  # steps or tokens from one look to the next, where drafts do not pay
_FRUITLESS = 8  # looks after which that is so
_FIRST_RATE, _OF_ROW, _OF_ALL = 0.5, 0.2, 0.02  # at which drafts come true, and how fast that is learnt


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Times of steps with one number of rows, in any unit. sizes: (tokens, seconds) of compiled steps, ascending.

    bare: of a step in which each row computes one token.
    """

    num_rows: int
    bare: float
    sizes: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, num_rows: int, bare: float, sizes: Iterable[Sequence[float]]) -> StepCosts:
        """Step times from lists, as a request log or message has them."""
        return cls(num_rows=num_rows, bare=bare, sizes=tuple((int(tokens), float(s)) for tokens, s in sizes))

    @functools.cached_property
    def break_even(self) -> float:
        """The rate at which drafts of all rows must come true to pay."""
        gains = [_MIN_GAIN * seconds / self.bare - 1 for _, seconds in self.sizes]
        return max(0.0, min((gain / (1 + gain) for gain in gains), default=0.0))

    def smallest(self, num_tokens: int) -> tuple[int, float]:
        """Tokens and seconds of the smallest step that holds so many."""
        return next(size for size in self.sizes if size[0] >= num_tokens)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OpenRow:
    """A row that samples in the step that is planned. most: drafted tokens that it may compute."""

    request: Request
    most: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OpenShard:
    """A data shard's part of the step that is planned. num_tokens, num_places: without drafts."""

    rows: Sequence[OpenRow]
    num_tokens: int
    num_places: int
    has_prompts: bool  # it computes tokens of some


@dataclasses.dataclass(slots=True)
class _RowRate:
    """Statistics of a row's drafts. expected: the last draft, which came after its first `length` tokens."""

    rate: float
    length: int = 0
    expected: Sequence[int] = ()


class Drafting:
    """The drafts of one engine's rows, in all data shards."""

    def __init__(
        self, source: Drafts, *, most: int, num_places: int, num_tokens: int, costs: Sequence[StepCosts] = ()
    ) -> None:
        """most: drafted tokens of a row. num_places, num_tokens: of a step of one shard. costs: by rows, ascending; no
        row has drafts before they are told."""
        self._source, self._most = source, most
        self._num_places, self._num_tokens = num_places, num_tokens
        self.costs = costs
        self.allowed: Callable[[Request, Sequence[int]], int] = lambda request, token_ids: len(token_ids)
        self.counts = SpeculationCounts()
        self._rows: dict[int, _RowRate] = {}  # by request id
        self._typical = _FIRST_RATE
        self._num_looks = self._num_fruitless = 0

    @property
    def source(self) -> Drafts:
        """Where drafts come from."""
        return self._source

    @property
    def heads(self) -> MtpDrafts | None:
        """The source, where it is to be told what the model drafts in each step."""
        return self._source if isinstance(self._source, MtpDrafts) else None

    def most_of(self, request: Request) -> int:
        """Drafted tokens that a row may compute in a step: the token behind them is one that it still wants."""
        if not request.takes_drafts:
            return 0
        return max(0, min(self._most, request.max_total_tokens - len(request.token_ids) - 1))

    def pays(self, shards: Sequence[OpenShard]) -> bool:
        """Whether the next step would have drafts, once the tokens in flight, which come first, are known.

        rows: the decoding rows. Their tokens are one behind the step in flight.
        """
        if any(shard.has_prompts for shard in shards):
            return False
        found = self._choose(shards, num_unknown=1) is not None
        self._num_fruitless = 0 if found else self._num_fruitless + 1
        return found

    @property
    def rests(self) -> bool:
        """Whether drafts paid so seldom that nobody looks for them in this step."""
        self._num_looks += 1
        return self._num_fruitless > _FRUITLESS and self._num_looks % _SELDOM > 0

    def choose(self, shards: Sequence[OpenShard]) -> list[dict[int, Sequence[int]]]:
        """For each shard the drafted tokens of its rows, by request id; those without any are left out."""
        return self._choose(shards, num_unknown=0) or [{} for _ in shards]

    def _choose(self, shards: Sequence[OpenShard], num_unknown: int) -> list[dict[int, Sequence[int]]] | None:
        if not self.costs or not any(row.most for shard in shards for row in shard.rows):
            return None
        costs = self._costs_of(max(shard.num_places for shard in shards))
        drafts = [{row.request.id: self._draft(row, costs, num_unknown) for row in shard.rows} for shard in shards]
        ranked = [list(_ranked(of_shard.values())) for of_shard in drafts]
        size = self._best_size(costs, shards, ranked)
        if size is None:
            return None
        found: list[dict[int, Sequence[int]]] = []
        for shard, of_shard, chances in zip(shards, drafts, ranked, strict=True):
            ids, counts = list(of_shard), [0] * len(of_shard)
            for _, row in chances[: self._room(shard, size)]:
                counts[row] += 1
            found.append({id: of_shard[id][0][:count] for id, count in zip(ids, counts, strict=True) if count})
        return found

    def _best_size(
        self, costs: StepCosts, shards: Sequence[OpenShard], ranked: Sequence[Sequence[tuple[float, int]]]
    ) -> int | None:
        """Tokens of the step that gives most tokens a second; None where that is the one without drafts."""
        if not any(ranked):
            return None
        sums = [list(itertools.accumulate((chance for chance, _ in of_shard), initial=0.0)) for of_shard in ranked]
        least, num_rows = max(shard.num_tokens for shard in shards), sum(len(shard.rows) for shard in shards)
        if not costs.sizes or costs.sizes[-1][0] < least:
            return None  # a larger executable has come, and nobody was told yet what its steps take
        has_prompts = any(shard.has_prompts for shard in shards)
        is_bare = not has_prompts and all(shard.num_tokens == shard.num_places for shard in shards)
        most, seconds = (0, costs.bare) if is_bare else costs.smallest(least)
        best, best_size = num_rows / seconds * _MIN_GAIN, None
        for size, seconds in costs.sizes:
            if size < least or (has_prompts and size > most):  # beside prompts only what is padding else
                continue
            gain = sum(
                sum_[min(len(sum_) - 1, self._room(shard, size))] for shard, sum_ in zip(shards, sums, strict=True)
            )
            if (num_rows + gain) / seconds > best:
                best, best_size = (num_rows + gain) / seconds, size
            if size >= self._num_tokens:
                break
        return best_size

    def _costs_of(self, num_rows: int) -> StepCosts:
        """The costs told of the fewest rows that are no fewer than these; of the most rows where there are none."""
        return next((costs for costs in self.costs if costs.num_rows >= num_rows), self.costs[-1])

    def _room(self, shard: OpenShard, size: int) -> int:
        """Drafted tokens that a step of so many tokens has room for."""
        tokens = min(size, self._num_tokens) - shard.num_tokens
        return max(0, min(tokens, self._num_places - shard.num_places))

    def _draft(self, row: OpenRow, costs: StepCosts, num_unknown: int) -> tuple[Sequence[int], list[float]]:
        """The drafted tokens of a row and the chance of each to come true; the unknown ones before them are no part.

        A row whose drafts pay by no means is asked about at every fourth token.
        """
        request = row.request
        book = self._learnt(request)
        is_poor = book.rate < 0.8 * costs.break_even
        if not request.takes_drafts or (is_poor and len(request.token_ids) % _SELDOM):
            return (), []
        most = row.most and row.most + num_unknown
        draft = self._source.propose(request, most if most > 0 else 1)  # to learn, where none is computed
        book.length, book.expected = len(request.token_ids), draft.token_ids
        if num_unknown and self.heads is not None:  # the step in flight brings the draft, which is the next one then
            return (UNKNOWN,) * row.most, [book.rate] * row.most
        tokens = list(itertools.takewhile(lambda token: token not in request.stop_ids, draft.token_ids[:most]))
        tokens = tokens[: self.allowed(request, tokens)] if request.is_constrained and tokens else tokens
        steps = (min(confidence, book.rate) for confidence in draft.confidences[: len(tokens)])
        chances = list(itertools.accumulate(steps, lambda a, b: a * b))
        return tokens[num_unknown:], chances[num_unknown:]

    def _learnt(self, request: Request) -> _RowRate:
        """The book of a row, with what became of its last drafts."""
        book = self._rows.get(request.id)
        if book is None:
            book = self._rows[request.id] = _RowRate(self._typical)
        for came, expected in zip(request.token_ids[book.length :], book.expected, strict=False):
            is_true = came == expected
            book.rate += (is_true - book.rate) * _OF_ROW
            self._typical += (is_true - self._typical) * _OF_ALL
            if not is_true:
                break
        book.expected = ()
        return book

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._rows.pop(request.id, None)
        self._source.forget(request)


def drafting_of(sizes: EngineSizes) -> Drafting | None:
    """The object that decides on an engine's drafts; None of an engine without drafts."""
    asked = sizes.speculative_config
    if asked is None:
        return None
    assert asked.num_speculative_tokens is not None, "each method has a default"
    return Drafting(
        make_drafts(asked),
        most=asked.num_speculative_tokens,
        num_places=sizes.num_places,
        num_tokens=sizes.max_num_batched_tokens,
    )


def _ranked(drafts: Iterable[tuple[Sequence[int], Sequence[float]]]) -> Iterator[tuple[float, int]]:
    """(chance, row) of drafted tokens, the likeliest first: of equal ones those of earlier rows, in their order."""
    of_rows = [
        [(-chance, row) for chance in chances if chance >= _MIN_CHANCE] for row, (_, chances) in enumerate(drafts)
    ]
    return ((-chance, row) for chance, row in heapq.merge(*of_rows))
