"""Shard: the rows and blocks of one data shard, and its part of the step that is being planned.

    begin()  ->  admit(...)  ->  close()  ->  finish(...)       then, when its results are there:  commit(...)

`begin` plans the rows that run already: decodes first, then prefill chunks, up to a token budget of the shard's own.
A prompt too long for the rest of the budget takes at most half of it while others wait, so one long prompt does not
hold up a short one behind it. Many do: each takes half of what those before it left, so the budget is spent after
about log2(budget) of them, and later prompts wait until some of these are computed. What nobody takes goes back to the
first, so no step is smaller for it. A row that must give way goes back to the queue that all shards have in common.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ferrum_jax.core.kv_cache.cache_manager import CacheManager
from ferrum_jax.core.metrics import SpeculationCounts
from ferrum_jax.core.request import FLEX, Request
from ferrum_jax.core.scheduler.committing import PlannedRows, ShardBooks, committed
from ferrum_jax.core.scheduler.drafting import Drafting, OpenRow, OpenShard
from ferrum_jax.core.scheduler.limits import holds
from ferrum_jax.core.scheduler.media_book import MediaBook
from ferrum_jax.core.scheduler.running_rows import RunningRows, build_shard
from ferrum_jax.core.scheduler.sketch import Sketch
from ferrum_jax.core.scheduler.waiting import WaitingQueue
from ferrum_jax.inputs.prompt import whole_chunk
from ferrum_jax.io.ints import ceil_div


class Shard:
    """Continuous batching over one data shard."""

    def __init__(
        self,
        *,
        index: int,
        cache: CacheManager,
        queue: WaitingQueue,
        images: MediaBook,
        drafting: Drafting | None = None,
    ) -> None:
        self.index = index
        self.cache = cache
        self.rows = RunningRows(cache.sizes.max_num_seqs)
        self._queue = queue
        self._images = images
        self._drafting = drafting
        self.max_num_batched_tokens = cache.sizes.max_num_batched_tokens
        self.sketch = self._empty_sketch()
        self._rests_flex = False  # the step that is being planned has none of them yet

    def limit_tokens(self, num_tokens: int | None) -> None:
        """Plan at most so many tokens from the next step on, None for as many as the sizes say."""
        most = self.cache.sizes.max_num_batched_tokens
        self.max_num_batched_tokens = most if num_tokens is None else min(num_tokens, most)

    def _empty_sketch(self) -> Sketch:
        none = np.zeros(0, np.int32)
        return Sketch(slots=none, starts=none, requests=[], chunks=[], budget=0, num_open=0)

    # -- where a request may go ------------------------------------------------------------------------

    @property
    def takes_rows(self) -> bool:
        """Whether a waiting request may become a row in the step that is being planned."""
        return self.sketch.budget > 0 and self.sketch.num_open > 0

    @property
    def load(self) -> tuple[int, int]:
        """Rows that run, then blocks that are held: the shard with less of them takes the next request."""
        return len(self.rows), sum(pool.num_live for pool in self.cache.pools)

    def holds(self, request: Request) -> bool:
        """Whether the request could run here to its end, with nothing beside it but what is pinned."""
        return holds(request, self.cache)

    def fills(self, request: Request) -> bool:
        """Whether the step that is being planned computes here what the request would compute too."""
        return self.cache.shares(request, self._filling())

    def _filling(self) -> set[bytes]:
        sketch = self.sketch
        if sketch.filling is None:
            sketch.filling = set()
            for request, count in sketch.chunks:
                sketch.filling.update(self.cache.keys_to_publish(request, request.num_computed + count))
        return sketch.filling

    def reserve(self) -> None:
        """Keep a row slot free in this step, for a request that will hit what it fills."""
        self.sketch.num_open -= 1

    # -- the step that is being planned ----------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether the step that is being planned has no row here."""
        return not self.sketch.requests and not self.sketch.chunks

    def begin(self, most: float, *, rests_flex: bool = False) -> None:
        """Plan the rows that run; new ones may follow where these neither wait for anything nor made a row give way.

        most: tokens of the step, where that is less than it may have. rests_flex: FLEX rows come by `fill_up` or not.
        """
        self._rests_flex = rests_flex
        preemptions = self.cache.counters.preemptions
        slots, requests, starts = self._plan_decodes()
        budget = int(min(most, self.max_num_batched_tokens)) - len(requests)
        chunks = self._plan_prefills(budget, is_first=not requests)
        waits = len(chunks) < len(self.rows.prefilling(without_flex=rests_flex))  # for tokens of the budget, or blocks
        preempted = self.cache.counters.preemptions != preemptions  # what was freed is for those that run
        self.sketch = Sketch(
            slots=slots,
            starts=starts,
            requests=requests,
            chunks=chunks,
            budget=budget - sum(count for _, count in chunks),
            num_open=0 if waits or preempted else self.rows.slots.num_free,
        )

    def _plan_decodes(self) -> tuple[np.ndarray, list[Request], np.ndarray]:
        """Slots [rows], requests and positions [rows] of the decoding rows, each with room for its token."""
        slots, requests, starts = self._open_decodes()
        short = self.cache.rows_to_grow(slots, starts + 1)
        if len(short) and not self._grow([requests[i] for i in short.tolist()]):
            slots, requests, starts = self._open_decodes()  # without the rows that were preempted
        return slots, requests, starts

    def _open_decodes(self) -> tuple[np.ndarray, list[Request], np.ndarray]:
        """The decoding rows that the token in flight does not bring to their length limit."""
        slots, requests = self.rows.decoding(without_flex=self._rests_flex)
        starts = self.rows.computed[slots]
        is_open = starts + 1 < self.rows.limits[slots]
        if not is_open.all():
            slots, starts = slots[is_open], starts[is_open]
            requests = [self.rows.at(slot) for slot in slots.tolist()]
        return slots, requests, starts

    def fill_up(self, num_tokens: float, *, longest: int | None) -> None:
        """Add FLEX rows to a plan that has all others: at most so many tokens. Nobody gives way for them.

        longest: most tokens of each, so that a step of one token a row stays one; None for any number.
        """
        self.sketch.give_what_is_left(self.cache.grow, self._chunk)
        sketch, self._rests_flex = self.sketch, False
        sketch.open_rest(num_tokens, longest)
        decodes = self._open_decodes()[1][len(sketch.requests) :]
        prompts = [request for request in self.rows.prefilling() if request.priority >= FLEX]
        sketch.fill(decodes, prompts, self.cache.grow, self._chunk)
        sketch.slots = np.array([request.slot for request in sketch.requests], np.int32)
        sketch.starts = self.rows.computed[sketch.slots]

    def _grow(self, requests: list[Request]) -> bool:
        """Room for one more token of each, the first first; False if rows had to be preempted for it."""
        preempted = False
        for request in requests:
            while request.slot and not self.cache.grow(request.slot, request.num_computed + 1):
                assert len(self.rows) > 1, f"the pool is too small for request {request.id} alone"
                self.preempt(self.rows.last())
                preempted = True
        return not preempted

    def preempt(self, request: Request) -> None:
        """Publish what the row has, free it and queue it again; its replay hits its own blocks."""
        self.cache.publish(request, request.slot, min(request.num_computed, len(request.token_ids)))
        token_in_flight = request.num_computed >= len(request.token_ids)  # its next token is still on the device
        self.leave([request])
        request.has_old_kv = False
        request.num_preemptions += 1
        self.cache.counters.preemptions += 1
        self._queue.push(request, is_awaited=token_in_flight)

    def begin_scores_anew(self) -> None:
        """Preempt the rows whose tokens are scored, which must all be of the same weights."""
        for request in self.rows.all():
            if not request.takes_hits or request.most_hit_tokens is not None:
                self.preempt(request)

    def _plan_prefills(self, budget: int, *, is_first: bool) -> list[tuple[Request, int]]:
        """Rows with tokens left to compute, each with its chunk's length, within `budget` tokens.

        A chunk for which a window's pool lacks blocks waits for those of other rows; where nothing else is planned
        before it (`is_first`), rows are preempted for it.
        """
        chunks: list[tuple[Request, int]] = []
        rows = self.rows.prefilling(without_flex=self._rests_flex)
        for behind, request in zip(reversed(range(len(rows))), rows, strict=True):
            share = _share(budget, others_wait=behind > 0 or self._others_wait(self.rows.slots.num_free))
            count = self._chunk(request, share, most=budget) if request.slot else 0
            if count == 0:
                break
            while not self.cache.grow(request.slot, request.num_computed + count):
                last = self.rows.last()
                if chunks or not is_first or last is request:
                    return chunks
                self.preempt(last)
            chunks.append((request, count))
            budget -= count
        return chunks

    def _others_wait(self, num_open: int) -> bool:
        """Whether requests wait that might become one of `num_open` rows."""
        return num_open > 0 and (self._queue.num_live if self._rests_flex else len(self._queue)) > 0

    def admit(self, request: Request) -> bool:
        """Make a waiting request a row and plan its first chunk; False, and nothing changed, where blocks lack."""
        sketch = self.sketch
        if not self._begins(request):
            return False
        (slot,) = self.rows.slots.take(1)
        num_hit = self.cache.admit(request, slot, sketch.room)
        if num_hit is None:
            self.rows.slots.release((slot,))
            return False
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_hit
        self._queue.remove(request.id)
        self._images.admit(request)
        self.rows.insert(request, slot, num_hit)
        request.shard = self.index
        is_long = len(request.token_ids) - num_hit > sketch.budget
        others_wait = self._others_wait(sketch.num_open - 1)
        count = self._chunk(request, _share(sketch.room, others_wait=is_long and others_wait), most=sketch.room)
        self._filling().update(self.cache.keys_to_publish(request, request.num_computed + count))
        sketch.chunks.append((request, count))
        sketch.budget -= count
        sketch.num_open -= 1
        return True

    def goes_on(self, horizon: int) -> bool:
        """Whether there are blocks for the decodes' tokens of this many forwards; nobody gives way for them.

        A recurrent state is computed up to a block boundary, where it can be kept. No more of a window is held than for
        a chunk.
        """
        sketch, cache = self.sketch, self.cache
        if cache.blocks.has_windows and horizon > cache.sizes.max_num_batched_tokens:
            return False
        turns = np.minimum(horizon, self.rows.limits[sketch.slots] - 1 - sketch.starts)
        if cache.states is not None:
            turns = np.minimum(turns, cache.sizes.block_size - sketch.starts % cache.sizes.block_size)
        sketch.turns, ends = turns, sketch.starts + turns
        short = cache.rows_to_grow(sketch.slots, ends).tolist()
        return all(cache.grow(int(sketch.slots[row]), int(ends[row])) for row in short)

    def close(self) -> OpenShard:
        """No row comes to the plan any more: the rows that sample and may have drafts, none where nobody drafts."""
        if not self.sketch.is_filled:
            self.sketch.give_what_is_left(self.cache.grow, self._chunk)
        decodes, chunks = self.sketch.requests, self.sketch.chunks
        ending = [
            (request, count) for request, count in chunks if request.num_computed + count == len(request.token_ids)
        ]
        drawing = [] if self._drafting is None else [*((request, 1) for request in decodes), *ending]
        rows = [self._open_row(request, count) for request, count in drawing]
        return OpenShard(
            rows=rows,
            num_tokens=self.sketch.num_tokens,
            num_places=len(decodes) + len(chunks),
            has_prompts=any(request.num_computed < request.num_prompt_tokens for request, _ in chunks),
        )

    def decoding(self) -> OpenShard:
        """The rows that decode, as a plan for them alone would have them."""
        rows = [self._open_row(request, 1) for request in self._open_decodes()[1]]
        has_prompts = self.rows.num_prefilling > 0 or self._others_wait(self.rows.slots.num_free)
        return OpenShard(rows=rows, num_tokens=len(rows), num_places=len(rows), has_prompts=has_prompts)

    def _open_row(self, request: Request, count: int) -> OpenRow:
        """Drafts come behind tokens that were drawn, so that a prompt's end is kept as it is."""
        takes_none = self.sketch.is_filled and request.priority >= FLEX  # they have the padding alone
        if self._drafting is None or count == 0 or takes_none or request.num_computed < request.num_prompt_tokens:
            return OpenRow(request=request, most=0)
        most = self.cache.most_drafts(len(request.token_ids))
        return OpenRow(request=request, most=min(self._drafting.most_of(request), most))

    def finish(self, drafts: Mapping[int, Sequence[int]], horizon: int = 1) -> PlannedRows:
        """The plan, booked as done: progress, and the prompt blocks that it fills, which the next admission may hit.

        drafts: of rows that sample, by request id. Their rows have come as far as without them, until the commit.
        """
        sketch, self.sketch = self.sketch, self._empty_sketch()
        requests = [*sketch.requests, *(request for request, _ in sketch.chunks)]
        roomy = {
            request.id: _with_room(self.cache, request, drafts[request.id])
            for request in requests
            if request.id in drafts
        }
        found = [roomy.get(request.id, ()) for request in requests]
        turns = sketch.turns if horizon > 1 else None
        plan = build_shard(self.cache, sketch.slots, sketch.starts, sketch.chunks, self.rows, found, turns, horizon)
        advanced = plan.counts - plan.num_drafts * (horizon == 1)
        for request, count in zip(requests, advanced.tolist(), strict=True):
            request.num_computed += count
        self.rows.computed[plan.slots] = plan.starts + advanced
        for request, _ in sketch.chunks:
            self._images.release_behind(request)
            if not roomy.get(request.id):
                self.cache.publish(request, request.slot, request.num_computed)
            if request.num_computed == len(request.token_ids):
                self.rows.start_decoding(request)
        return PlannedRows(plan=plan, requests=requests, epochs=self.rows.epochs[plan.slots])

    def _begins(self, request: Request) -> bool:
        """Whether the rest of the budget holds what a waiting request begins with: an image may have to be whole."""
        if not any(image.sees_both_ways for image in request.images):
            return True
        num_hit = self.cache.num_hit_tokens(request)
        return num_hit == len(request.token_ids) or whole_chunk(request.images, num_hit, 1, self.sketch.budget) > 0

    def _chunk(self, request: Request, budget: int, *, most: int) -> int:
        """How many of a row's known tokens the step computes: at most `budget`, or `most` where an image must be whole.

        0 where that is too few for the image.
        """
        count = self._queue.cut(request, self.cache.chunk(request, budget))
        return whole_chunk(request.images, request.num_computed, count, most)

    # -- its results -----------------------------------------------------------------------------------

    def commit(self, planned: PlannedRows, token_ids: np.ndarray, first: int) -> Iterator[list[tuple[Request, int]]]:
        """Take the sampled tokens [places]; see `committed`, whose places count from `first` on."""
        counts = SpeculationCounts() if self._drafting is None else self._drafting.counts
        books = ShardBooks(rows=self.rows, cache=self.cache, awaited=self._queue.awaited, counts=counts)
        return committed(planned, token_ids, first, books)

    def extend(self, request: Request, token_ids: Sequence[int]) -> None:
        """Give one that runs here or waits more known tokens, behind those that it has."""
        request.token_ids.extend(token_ids)
        if request.slot:
            self.rows.extend(request)

    def leave(self, requests: Sequence[Request]) -> None:
        """Take rows off and free what they hold."""
        self.cache.release(*[request.slot for request in requests])
        for request in requests:
            self._images.release(request)
            self.rows.remove(request)

    def check_invariants(self) -> None:
        """Prove the books of rows and blocks."""
        self.rows.check_invariants()
        running = self.rows.all()
        self.cache.check_invariants(running)
        for request in running:
            assert request.shard == self.index, f"request {request.id} runs on another shard than it says"
            assert request.finish_reason is None, f"request {request.id} runs after its end"
            assert request.id not in self._queue, f"request {request.id} runs and waits"


def _share(budget: int, *, others_wait: bool) -> int:
    """The most tokens of a chunk: half of the budget, rounded up, while others wait for some of it."""
    return ceil_div(budget, 2) if others_wait else budget


def _with_room(cache: CacheManager, request: Request, drafts: Sequence[int]) -> Sequence[int]:
    """The drafts for which there is room, which nobody gives way for."""
    num_tokens = len(request.token_ids)
    while drafts and not cache.grow(request.slot, num_tokens + len(drafts)):
        drafts = drafts[:-1]
    return drafts if drafts and cache.begin_drafts(request.slot) else ()
