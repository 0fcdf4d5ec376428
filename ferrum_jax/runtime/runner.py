"""The runner: owns weights and pools on the device, and turns a StepPlan into two calls: forward, then sample.

A model whose own layer drafts has a third, which reads what was drawn.

All data shards of a step run in one bucket, the smallest that fits all their parts; a shard without rows runs padding.
A step is dispatched and its result fetched later; pools are threaded from call to call, so the order of
dispatch is the only synchronisation. One runner serves one thread.
"""

import dataclasses
import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ferrum_jax.core.plan import Copy, ShardPlan, StepPlan
from ferrum_jax.inputs.prompt import EncodableImage
from ferrum_jax.runtime.block_copies import BlockCopies
from ferrum_jax.runtime.buckets import Bucket, DraftBucket, Ladder, LaunchBucket, RowBucket
from ferrum_jax.runtime.compile.deferred import DeferredExecutable
from ferrum_jax.runtime.compile.worth import Saving
from ferrum_jax.runtime.dispatched import InFlight, Scores, Spares
from ferrum_jax.runtime.draft import DraftLayer
from ferrum_jax.runtime.horizons import Horizons
from ferrum_jax.runtime.host_transfers import HostTransfers
from ferrum_jax.runtime.inputs import (
    forward_words,
    pack_copies,
    pack_drafts,
    pack_forward,
    pack_places,
    pack_sample,
    pack_score,
    place_words,
    sample_words,
)
from ferrum_jax.runtime.media_encoders.clip_slots import ClipSlots
from ferrum_jax.runtime.media_encoders.image_slots import ImageSlots
from ferrum_jax.runtime.pools.pools import Pools
from ferrum_jax.runtime.programs import LAUNCH_S, Executables
from ferrum_jax.runtime.sample import MASKS_AT_ONCE, SCORE_TILE, Head


class Runner:
    """Runs steps on the devices of a mesh."""

    def __init__(
        self,
        *,
        weights: tuple[jax.Array, ...],
        pools: Pools,
        executables: Executables,
        head: Head,
        ladder: Ladder,
        copies: BlockCopies,
        num_shards: int = 1,
        host: HostTransfers | None = None,
        images: ImageSlots | ClipSlots | None = None,
        names: Sequence[str] = (),
        draft_layer: DraftLayer | None = None,
        spares: Spares,
    ) -> None:
        """host: copies to and from the host tier, if there is one. images: slots of a model that sees images, whose
        weights have these names. draft_layer: runs behind each step, if there is one. spares: for results of parts."""
        self._image_slots, self._names = images, tuple(names)
        self._whole_head, self._draft_layer, self._spares = head, draft_layer, spares
        self._adapters: tuple[jax.Array, ...] = ()
        if "fresh_adapters" in executables.others:
            self._adapters = executables["fresh_adapters"]()
        self.take_weights(weights)
        self._caches = pools.flat_caches()
        self._caches_tree = jax.tree.structure(pools.caches)
        self._drafted = slice(0) if draft_layer is None else draft_layer.span(pools)
        self.copies, self.transfers, self._call = copies, copies.transfers, copies.transfers.call
        self.host = host
        self._num_shards = num_shards
        self._slots = pools.slots
        self._prompts = pools.prompts
        self._masks = pools.masks
        self._hidden = pools.hidden
        self._clips = images.places(pools) if isinstance(images, ClipSlots) else ()
        has_pool = isinstance(images, ImageSlots)
        self._images: tuple[jax.Array, ...] = (executables["fresh_images"](),) if has_pool else ()
        self.num_encoder_calls = 0
        self._executables, self.horizons = executables, Horizons(executables)
        self._head_share = sum(x.size for x in self._head) / max(sum(x.size for x in self._weights), 1)
        self._ladder, self._full_ladder = ladder, ladder
        self._num_parts = 0
        self.take_parts()
        self.num_steps = 0
        self.num_tokens = 0
        self.num_padded_tokens = 0
        # tokens of decodes, of chunks, slots of both
        self.recent_steps: deque[tuple[int, int, int]] = deque(maxlen=200)

    def take_weights(self, weights: tuple[jax.Array, ...]) -> None:
        """Steps from now on run with these."""
        self._weights, self._towers = weights, ()
        if self._image_slots is not None:
            self._towers = self._image_slots.pick(self._names, weights)
            self._weights = tuple(
                array for name, array in zip(self._names, weights, strict=True) if name not in self._image_slots.weights
            )
        self._head = self._whole_head.pick(self._weights, self._adapters)
        self._draft_weights = () if self._draft_layer is None else self._draft_layer.pick(self._weights)

    def take_parts(self) -> bool:
        """Lets steps use the executables that have been added; whether there were any since the last call."""
        if len(self._executables) == self._num_parts:
            return False
        self._num_parts = len(self._executables)
        missing = self._executables.missing(self._full_ladder)
        self._ladder = dataclasses.replace(self._full_ladder, missing=missing)
        return True

    @property
    def ladder(self) -> Ladder:
        """The buckets, and which of them are missing."""
        return self._ladder

    @property
    def num_missing(self) -> int:
        """Executables of the ladder that are not there."""
        return len(self._ladder.missing)

    @property
    def compiled(self) -> list[dict[str, Any]]:
        """Executables that were compiled while steps ran, as `Worth.report` tells of them."""
        return self._executables.worth.report()

    @property
    def num_executables(self) -> int:
        return len(self._executables)

    @property
    def num_loaded(self) -> int:
        """Executables that are loaded; the others are still bytes, because no step needed them."""
        return self._executables.num_loaded

    def close(self) -> None:
        """Frees the pools, also those that an interrupted step has donated and not returned."""
        own = (self._slots, self._prompts, self._masks, self._hidden)
        for pool in (*self._caches, *own, *self._adapters, *self._images):
            pool.delete()
        if self.host is not None:
            self.host.close()

    def write_slot(self, shard: int, slot: int, record: np.ndarray) -> None:
        """Puts the sampling record of a request that is about to run into its row slot."""
        places = np.full(self._num_shards, self._slots.shape[0], np.int32)  # dropped by other shards
        places[shard] = slot
        self._slots = self._call(self._executables["write_slot"], self._slots, places, record)

    def _pools(self) -> Pools:
        kv, states = jax.tree.unflatten(self._caches_tree, self._caches)
        return Pools(
            kv=kv, states=states, slots=self._slots, prompts=self._prompts, masks=self._masks, hidden=self._hidden
        )

    def read_pool(self, shard: int, index: int, ids: Sequence[int]) -> Iterator[tuple[slice, Any]]:
        """(slice of `ids`, their content and then padding) in batches, on their way to the host.

        index: of the pool, as in `BlockCopies`, which also gives the form of the content.
        """
        return self.copies.read(self._pools(), shard, index, ids)

    def send_pool(self, shard: int, index: int, ids: Sequence[int]) -> Iterator[tuple[slice, Any]]:
        """The batches of `read_pool` before they have come, for `transfers.fetch`."""
        return self.copies.send(self._pools(), shard, index, ids)

    def compute_s(self, num_tokens: int, a_step: int) -> float:
        """Seconds that so many tokens take with so many a step, by the steps so far; 0 before the first."""
        return self._executables.worth.seconds(Saving(tokens=num_tokens, steps=num_tokens / a_step))

    def write_pool(self, shard: int, index: int, ids: Sequence[int], data: Callable[[slice, int], Any]) -> None:
        """Writes the content of `ids` into a pool; data(slice of `ids`, size) gives each batch."""
        pools = self.copies.write(self._pools(), shard, index, ids, data)
        self._caches, self._prompts = pools.flat_caches(), pools.prompts

    def move(self, shard: int, spills: Sequence[Copy], loads: Sequence[Copy]) -> None:
        """Starts copies of a shard's blocks to its host tier, and then of host blocks to its pools."""
        if self.host is not None:
            self.host.spill(self._pools(), shard, spills)
            self._caches = self.host.load(self._pools(), shard, loads).flat_caches()

    def _copy(self, copies: Sequence[Sequence[Copy]]) -> None:
        """Starts the copies of each shard."""
        for blob in pack_copies(copies):
            self._caches = self._call(self._executables["copy_blocks"], self._caches, blob)

    def rehearse(self, num_groups: int) -> None:
        """Runs the largest parts without rows, so that a lack of memory shows now. Their writes go to null ids."""
        for part in self._ladder.largest_parts:
            if isinstance(part, Bucket):
                began_s = time.perf_counter()
                self._forward(part, np.zeros(self._num_shards * forward_words(part, num_groups), np.int32))
                jax.block_until_ready(self._hidden)
                self._executables.worth.done(part.num_tokens, began_s)
            elif isinstance(part, DraftBucket):
                blob = np.zeros(self._num_shards * forward_words(part.forward, num_groups), np.int32)
                places = np.zeros(self._num_shards * place_words(part.num_places), np.int32)
                jax.block_until_ready(self._draft(part, blob, places))
            else:
                blob = np.zeros(self._num_shards * sample_words(part.num_rows), np.int32)
                jax.block_until_ready(self._sample(part, blob))
            self._spares.returning()()

    def _forward(self, bucket: Bucket, blob: np.ndarray) -> Sequence[jax.Array]:
        """Starts one; what it gives beside the pools."""
        forward = self._executables.forwards[bucket]
        more = (self._adapters,) if bucket.adapted else self._images if bucket.imaged else ()
        arguments = (self._weights, self._caches, self._slots, self._hidden, *more, blob)
        self._caches, self._hidden, *results = self._spares.call(bucket, forward, *arguments)
        return results

    def _launch(self, bucket: LaunchBucket, blob: np.ndarray) -> tuple[jax.Array, Sequence[jax.Array]]:
        """Starts a whole decode step; its rows, and what a forward gives beside the pools."""
        launch = self._executables.launches[bucket]
        arguments = (self._weights, self._caches, self._slots, self._hidden, blob)
        self._caches, self._slots, self._hidden, rows, *results = self._spares.call(bucket, launch, *arguments)
        return rows, results

    def _draft(self, bucket: DraftBucket, blob: np.ndarray, places: np.ndarray) -> jax.Array:
        """Starts the layer that predicts one token more. blob: of the step's forward."""
        own, draft = self._caches[self._drafted], self._executables.drafts[bucket]
        arguments = (self._draft_weights, own, self._slots, self._hidden, blob, places)
        own, drafts = self._spares.call(bucket, draft, *arguments)
        self._caches = (*self._caches[: self._drafted.start], *own, *self._caches[self._drafted.stop :])
        return drafts

    def _draft_behind(self, bucket: Bucket, blob: np.ndarray, shards: Sequence[ShardPlan]) -> Sequence[jax.Array]:
        """Starts what predicts one token more behind a step's draws, if something does; it writes KV of its own."""
        draft = self._ladder.draft_of(bucket)
        if draft is None:
            return ()
        return (self._draft(draft, blob, self._spares.words(pack_places(shards, draft.num_places))),)

    def encode(self, images: Sequence[tuple[EncodableImage, Sequence[int]]]) -> None:
        """Starts towers over images or clips, each into its runs, for the steps that are dispatched from now on."""
        assert self._image_slots is not None, "the model has a tower"
        for part, place, arguments in self._image_slots.calls(images):
            encode, tower = self._executables[part], self._towers[place]
            if self._clips:
                filled = self._call(encode, tower, tuple(self._caches[i] for i in self._clips), *arguments)
                there = dict(zip(self._clips, filled, strict=True))
                self._caches = tuple(there.get(i, array) for i, array in enumerate(self._caches))
            else:
                self._images = (self._call(encode, tower, *self._images, *arguments),)
            self.num_encoder_calls += 1

    def write_adapter(self, slot: int, staged: tuple[jax.Array, ...]) -> None:
        """Puts an adapter into a slot, for the steps that are dispatched from now on."""
        self._adapters = self._call(self._executables["write_adapter"], self._adapters, np.int32(slot), staged)
        self._head = self._whole_head.pick(self._weights, self._adapters)

    def _sample(self, bucket: RowBucket, blob: np.ndarray) -> tuple[jax.Array, jax.Array]:
        sample = self._executables.samples[bucket]
        arguments = (self._head, self._slots, self._prompts, self._masks, self._hidden, blob)
        self._slots, self._prompts, rows, last = self._spares.call(bucket, sample, *arguments)
        return rows, last

    def write_masks(self, ids: Sequence[Sequence[int]], masks: Sequence[np.ndarray]) -> None:
        """Puts masks [n, words] int32 under n ids, of each shard, for the steps that sample from now on."""
        for start in range(0, max(map(len, ids)), MASKS_AT_ONCE):
            places = np.full((self._num_shards, MASKS_AT_ONCE), self._masks.shape[0], np.int32)  # beyond the pool
            rows = np.zeros((self._num_shards, MASKS_AT_ONCE, self._masks.shape[1]), np.int32)
            for shard in range(self._num_shards):
                some = ids[shard][start : start + MASKS_AT_ONCE]
                places[shard, : len(some)] = some
                rows[shard, : len(some)] = masks[shard][start : start + MASKS_AT_ONCE]
            flat = rows.reshape(-1, rows.shape[2])
            self._masks = self._call(self._executables["write_masks"], self._masks, places.reshape(-1), flat)

    def dispatch(self, plan: StepPlan, before_sampling: Callable[[], None] = lambda: None) -> InFlight:
        """Starts a step and the copy of its result to the host; returns at once.

        before_sampling: called when the forward has been started, which needs no masks, and before what samples is.
        """
        shards, horizon, (laid_out, bucket) = plan.shards, plan.shards[0].horizon, self._ladder.laid_out(plan)
        if self._ladder.missing and horizon == 1:
            self._executables.want(plan, self._full_ladder, self._ladder, self._head_share)
        for index, shard in enumerate(shards):
            if shard.spills or shard.loads:
                self.move(index, shard.spills, shard.loads)
        self._copy([shard.copies_before for shard in shards])
        if plan.has_drafts:
            size = self._masks.shape[0] // self._num_shards
            written = pack_drafts(shards, size, beyond=self._slots.shape[0])
            self._slots = self._call(self._executables["write_drafts"], self._slots, written)
        launch, worth = self._full_ladder.launch_of(plan, bucket), self._executables.worth
        assert horizon == 1 or launch in self._executables.launches, f"{launch} is not there, and the plan needs it"
        if launch is not None and launch not in self._executables.launches:
            worth.want(launch, Saving(seconds=LAUNCH_S))
            launch = None
        last, drafts = None, ()
        blob = self._spares.words(pack_forward(laid_out.shards, bucket))
        if launch is not None:
            worth.ran(launch)
            rows, experts = self._launch(launch, blob)
        else:
            row_bucket = self._ladder.row_bucket_of(plan)
            worth.ran(bucket)
            worth.ran(row_bucket)
            experts = self._forward(bucket, blob)
            before_sampling()
            rows, last = self._sample(row_bucket, self._spares.words(pack_sample(shards, row_bucket.num_rows)))
            drafts = self._draft_behind(bucket, blob, shards)
        self._copy([shard.copies_after for shard in shards])
        self.transfers.send((*experts, rows, *drafts))
        num_turns = self._count(plan, bucket)
        kind = bucket, shards[0].draw, num_turns
        calls = {
            "_done": functools.partial(worth.done, bucket.num_tokens, time.perf_counter(), kind, num_turns),
            "_give": self._spares.returning(),
        }
        results: dict[str, Any] = {"_rows": rows, "_last": last, "_experts": experts, "_drafts": drafts}
        return InFlight(plan=plan, bucket=bucket, _transfers=self.transfers, **results, **calls)

    def _count(self, plan: StepPlan, bucket: Bucket) -> int:
        """Counts the forwards of a plan, each as a step of its own, and gives how many they are."""
        counts = np.concatenate([shard.counts for shard in plan.shards])
        num_slots, num_tokens = bucket.num_tokens * len(plan.shards), int(np.add.reduce(counts))
        if plan.shards[0].horizon == 1:
            num_ones = int(np.add.reduce(counts == 1))  # decodes, and a prompt's lone last token
            forwards = [(num_ones, num_tokens - num_ones, num_slots)]
        else:
            forwards = [(int(np.add.reduce(counts > turn)), 0, num_slots) for turn in range(max(counts.tolist()))]
        self.recent_steps.extend(forwards)
        self.num_steps += len(forwards)
        self.num_tokens += num_tokens
        self.num_padded_tokens += num_slots * len(forwards)
        return len(forwards)

    def begin_scores(self, *, every: bool) -> DeferredExecutable | None:
        """The compile that `score`, or `score_all`, waits for or failed with; None once it is there."""
        part = self._executables.others.deferred("score_all" if every else "score")
        if not part.compiles or (part.done and part.error() is None):
            return None
        part.begin()
        return part

    def score(self, asked: Sequence[np.ndarray], *, tops: bool, named: Sequence[np.ndarray] | None = None) -> Scores:
        """Starts prompt log-probabilities of tokens of the step that was dispatched last, before the next is.

        asked: [4, n] of each shard, places among its tokens, the tokens that follow, row slots and the positions that
        what follows takes. tops: the most likely ones too. named: of each shard, tokens that are scored at each of
        these, [n, MAX_NAMED_IDS].
        """
        return self._by_tiles(self._executables["score"], asked, tops=tops, named=named)

    def score_all(self, asked: Sequence[np.ndarray]) -> Scores:
        """`score` over the whole vocabulary: [tokens, 1 + V] words, the token that follows and each token's."""
        return self._by_tiles(self._executables["score_all"], asked, tops=False)

    def _by_tiles(
        self,
        score: Callable[..., Any],
        asked: Sequence[np.ndarray],
        *,
        tops: bool,
        named: Sequence[np.ndarray] | None = None,
    ) -> Scores:
        counts = [tokens.shape[1] for tokens in asked]
        tiles = []
        for start in range(0, max(counts), SCORE_TILE):
            parts = [tokens[:, start : start + SCORE_TILE] for tokens in asked]
            names = None if named is None else [ids[start : start + SCORE_TILE] for ids in named]
            blob = pack_score(parts, SCORE_TILE, tops=tops, named=names)
            tiles += self._call(score, self._head, self._slots, self._hidden, blob)
            self.transfers.send(tiles[-1:])
        return Scores(counts=counts, _transfers=self.transfers, _tiles=tiles)
