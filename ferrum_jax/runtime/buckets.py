"""The ladder: every compiled shape of the step, enumerated before the first step.

A bucket of the forward is (T tokens, R rows, M blocks per row). Decode buckets hold at most one token a row (T == R).
Mixed buckets hold any counts; their R is the most rows there are, because attention runs over tiles that exist, so
spare rows cost nothing. What samples has row buckets alone, those of decode, whatever the forward before it was. Token
buckets and row buckets therefore add, not multiply.

Where the requests are known beforehand, their `Reach` leaves out the buckets that none of their steps takes. The
others are the same executables as without it, so jobs share what a store or a bundle holds.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Sequence

from ferrum_jax.core.plan import MAX_HORIZON, Draw, StepPlan
from ferrum_jax.inputs.sizes.engine_sizes import Reach
from ferrum_jax.inputs.sizes.invariance import MIN_ROWS
from ferrum_jax.io.ints import ceil_div, round_up

SMALLEST_MIXED_TOKENS = 16
_ACCELERATOR_ROWS = 8  # rows of a tile of their vector units: fewer take as long
_ACCELERATOR_MIXED_TOKENS = 128
_FINE_TOKENS = 256  # from here on a mixed step's time grows with its tokens, so sizes lie closer
_WIDTH_STEP = 4  # from one table width to the next
_MIN_WIDTH_TOKENS = 1024  # narrower tables save nothing, and requests of other lengths would share no executable
FIRST_TOKENS = 128  # of the first forward on the CPU, where a step takes longer the more tokens it has
FIRST_ROWS = 16  # of the first decode there
# Places of a step with drafts: so many tokens take little longer than one, because weights are what takes long.
_PLACES_ON_CPU, _PLACES_ON_ACCELERATORS = 64, 256


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class Bucket:
    """One compiled shape. decode_only: no row computes more than one token, and T == R.

    adapted: rows may name adapters. imaged: tokens may be of images.
    """

    num_tokens: int  # T
    num_rows: int  # R
    table_width: int  # M
    decode_only: bool
    adapted: bool = False
    imaged: bool = False

    @property
    def kind(self) -> tuple[bool, bool]:
        """Features that only this bucket's steps may have."""
        return self.adapted, self.imaged

    def __str__(self) -> str:
        more = f"{'adapted ' if self.adapted else ''}{'imaged ' if self.imaged else ''}"
        kind = f"{more}{'decode' if self.decode_only else 'mixed'}"
        return f"{kind} T={self.num_tokens} R={self.num_rows} M={self.table_width}"


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class RowBucket:
    """One compiled shape of what samples: so many rows, whatever the forward before it was."""

    num_rows: int  # R

    def __str__(self) -> str:
        return f"sample R={self.num_rows}"


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class LaunchBucket:
    """One compiled shape of a whole decode step: a bucket's forward, and what samples rows that ask for this.

    horizon: how often both may run, at most; what says how often is data.
    """

    forward: Bucket
    draw: Draw
    horizon: int = 1

    def __str__(self) -> str:
        return f"launch {self.forward} {self.draw.name.lower()}{f' x{self.horizon}' if self.horizon > 1 else ''}"


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class DraftBucket:
    """One compiled shape of the layer that predicts one token more. forward: the bucket of the same step's forward.

    Adapters change nothing in the layer, so `forward` is one without. num_places: for which it gives tokens, at most.
    """

    forward: Bucket
    num_places: int

    def __str__(self) -> str:
        return f"draft {self.forward} places={self.num_places}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ladder:
    """The buckets of an engine, smallest first. missing: those that are not compiled yet, and no step is given.

    num_places: of the largest step with drafts; 0 where there are none, and each row has one place. spreads: rows with
    drafts may be computed as rows of one token each, so that decode buckets hold them. predicts: each forward has a
    layer behind it that predicts one token more. has_launches: decode steps may be one executable. goes_on: and several
    steps too.
    """

    buckets: tuple[Bucket, ...]
    missing: frozenset[Bucket | RowBucket] = frozenset()
    num_places: int = 0
    spreads: bool = False
    predicts: bool = False
    has_launches: bool = False
    goes_on: bool = False

    @property
    def largest(self) -> tuple[Bucket, ...]:
        """The last mixed bucket and, where there are any, the last of decode."""
        decode = [bucket for bucket in self.buckets if bucket.decode_only]
        mixed = [bucket for bucket in self.buckets if not bucket.decode_only]
        return (*mixed[-1:], *decode[-1:])

    @property
    def largest_parts(self) -> tuple[Bucket | RowBucket | DraftBucket, ...]:
        """The largest forwards, the last row bucket and the largest draft: one of them needs the most memory.

        The first have activations, the second has the logits of all of its rows at once, the last has both.
        """
        return (*self.largest, self.row_buckets[-1], *self.drafts_of(self.largest[:1]))

    def draft_of(self, bucket: Bucket) -> DraftBucket | None:
        """The bucket that predicts one token more behind a forward, or None.

        A row has one draft at most, hence two places; one place where no row computes more than one token.
        """
        if not self.predicts:
            return None
        most = bucket.num_rows if bucket.decode_only else min(2 * bucket.num_rows, self.row_buckets[-1].num_rows)
        return DraftBucket(forward=dataclasses.replace(bucket, adapted=False), num_places=most)

    def drafts_of(self, buckets: Iterable[Bucket]) -> tuple[DraftBucket, ...]:
        """`draft_of` of each, those that are there, once."""
        return tuple(dict.fromkeys(draft for bucket in buckets if (draft := self.draft_of(bucket)) is not None))

    @functools.cached_property
    def row_buckets(self) -> tuple[RowBucket, ...]:
        """The buckets of what samples, smallest first: the last holds the rows of any step, known requests or not."""
        most = self.largest[0].num_rows  # a decode bucket may have room for more rows than a step has
        sizes = {min(bucket.num_rows, most) for bucket in self.buckets}
        if self.num_places > most:
            sizes |= {size for size in _powers(1, self.num_places) if size > most}
        return tuple(RowBucket(num_rows=size) for size in sorted(sizes))

    @functools.cached_property
    def kinds(self) -> dict[tuple[bool, bool], tuple[Bucket, ...]]:
        """The buckets of plain steps and, where there are any, of those with adapters or with images. An invariant
        engine with either has the latter alone, so that a row's bits do not depend on what others have."""
        kinds = sorted({bucket.kind for bucket in self.buckets})
        return {kind: tuple(b for b in self.buckets if b.kind == kind) for kind in kinds}

    def for_steps(self, *, adapted: bool, imaged: bool) -> tuple[Bucket, ...]:
        """The buckets of steps in which a row names an adapter or a token is of an image, or of all others."""
        return self.buckets if len(self.kinds) == 1 else self.kinds[adapted, imaged]

    def find(
        self, *, num_tokens: int, num_rows: int, longest: int, adapted: bool = False, imaged: bool = False
    ) -> Bucket:
        """The smallest bucket that holds a step; a decode bucket only where no row computes more than one token.

        longest: tokens of the row that computes most. adapted: whether a row names an adapter. imaged: whether a token
        is of an image.
        """
        decode = longest <= 1
        for bucket in self.for_steps(adapted=adapted, imaged=imaged):
            if bucket in self.missing:
                continue
            if bucket.num_tokens >= num_tokens and bucket.num_rows >= num_rows and (decode or not bucket.decode_only):
                return bucket
        raise AssertionError(f"no bucket holds {num_tokens} tokens in {num_rows} rows: {self.buckets}")

    def bucket_of(self, plan: StepPlan) -> Bucket:
        """The bucket of a step: it holds the rows of each shard."""
        shards = plan.shards
        num_rows = max(shard.num_rows for shard in shards)
        if plan.shards[0].horizon > 1:  # of no adapter and no image
            return self.find(num_tokens=num_rows, num_rows=num_rows, longest=1)
        return self.find(
            num_tokens=max(shard.num_tokens for shard in shards),
            num_rows=num_rows,
            longest=max(int(shard.counts.max(initial=0)) for shard in shards),
            adapted=plan.is_adapted,
            imaged=plan.has_images,
        )

    def laid_out(self, plan: StepPlan) -> tuple[StepPlan, Bucket]:
        """The plan as its forward computes it, and the bucket: in rows of one token where a decode bucket holds it."""
        bucket = self.bucket_of(plan)
        found = plan.in_rows_of_one() if self.spreads and plan.has_drafts else None
        if found is not None and bucket.num_tokens > self._smallest_decode(found):
            return found, self.bucket_of(found)
        return plan, bucket

    def _smallest_decode(self, plan: StepPlan) -> float:
        """Tokens of the smallest decode bucket that holds a plan of rows of one token; infinity if none does."""
        kind = self.for_steps(adapted=plan.is_adapted, imaged=plan.has_images)
        rows = max(shard.num_rows for shard in plan.shards)
        sizes = [b.num_tokens for b in kind if b.decode_only and b.num_rows >= rows and b not in self.missing]
        return min(sizes, default=math.inf)

    def row_bucket_of(self, plan: StepPlan) -> RowBucket:
        """The smallest bucket in which the places of each shard of a step can be sampled."""
        num_places = max(shard.num_places for shard in plan.shards)
        return next(b for b in self.row_buckets if b.num_rows >= num_places and b not in self.missing)

    def launch_of(self, plan: StepPlan, bucket: Bucket) -> LaunchBucket | None:
        """The launch of a step with this bucket, or None where it takes two executables."""
        launch = LaunchBucket(forward=bucket, draw=plan.draw, horizon=plan.shards[0].horizon)
        return launch if launch in self.launches else None

    @functools.cached_property
    def launches(self) -> frozenset[LaunchBucket]:
        """The executables without which every step can run too, as two."""
        buckets = [b for b in self.buckets if b.decode_only and not b.adapted] if self.has_launches else []
        kinds = itertools.product(buckets, (Draw.GREEDY, Draw.PLAIN), (1, MAX_HORIZON) if self.goes_on else (1,))
        return frozenset(LaunchBucket(forward=b, draw=draw, horizon=horizon) for b, draw, horizon in kinds)

    @property
    def most_tokens(self) -> int | None:
        """Tokens of the largest step of any kind that is not missing; None where that is the largest of all."""
        most = []
        for buckets in self.kinds.values():
            mixed = [bucket for bucket in buckets if not bucket.decode_only]
            there = [bucket for bucket in mixed if bucket not in self.missing]
            most += [there[-1].num_tokens] if there[-1:] != mixed[-1:] else []
        return min(most, default=None)

    def first_parts(self, least_tokens: int) -> tuple[Bucket | RowBucket, ...]:
        """A mixed bucket of each kind with at least so many tokens, if there is one, and all rows: steps fit these, or
        are cut. And decode of some rows, so that nobody waits for 128 tokens to draw one."""
        rows = self.row_bucket_of_all
        least, found = max(least_tokens, rows.num_rows), []
        for buckets in self.kinds.values():
            mixed = [bucket for bucket in buckets if not bucket.decode_only]
            found.append(next((bucket for bucket in mixed if bucket.num_tokens >= least), mixed[-1]))
            decode = [bucket for bucket in buckets if bucket.decode_only]
            found += [bucket for bucket in decode if bucket.num_rows >= FIRST_ROWS][:1] or decode[-1:]
        return *found, *dict.fromkeys((rows, self.row_buckets[-1]))

    @property
    def row_bucket_of_all(self) -> RowBucket:
        """The smallest that holds all rows, each with one place."""
        most = self.largest[0].num_rows
        return next(bucket for bucket in self.row_buckets if bucket.num_rows >= most)


def most_places(max_num_seqs: int, max_num_batched_tokens: int, *, accelerator: bool) -> int:
    """Places of the largest step: more than there are rows only where the tokens of drafts cost little."""
    cheap = _PLACES_ON_ACCELERATORS if accelerator else _PLACES_ON_CPU
    return max(max_num_seqs, min(cheap, max_num_batched_tokens))


def make_ladder(
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    table_width: int,
    invariant: bool,
    accelerator: bool = False,
    adapters: bool = False,
    images: bool = False,
    reach: Reach | None = None,
) -> Ladder:
    """Powers of two up to the limits, in mixed buckets beyond 256 also what lies half way between two of them.

    invariant: mixed buckets alone, powers of two, none under 64 tokens or rows.
    accelerator: of a TPU or GPU, for which small buckets are compiled and save nothing. reach: of all requests, None
    for whatever comes. adapters: each bucket is there a second time for steps in which rows name adapters; in invariant
    mode for these alone. images: mixed buckets are there a second time for steps in which tokens are of images.
    """
    if invariant:
        rows = max(max_num_seqs, MIN_ROWS)
        tokens = _powers(MIN_ROWS, max(max_num_batched_tokens, MIN_ROWS))
        decode: Sequence[int] = ()
    else:
        rows = max_num_seqs
        smallest = _ACCELERATOR_MIXED_TOKENS if accelerator else SMALLEST_MIXED_TOKENS
        tokens = _finer(_powers(smallest, max(max_num_batched_tokens, smallest)))
        decode = _powers(min(_ACCELERATOR_ROWS, max_num_seqs) if accelerator else 1, max_num_seqs)
    if reach is not None:  # the first forward stays, so that starts with other requests find it
        tokens = _up_to(tokens, max(reach.num_tokens, FIRST_TOKENS, rows))
        first = [] if accelerator else [rows for rows in decode if rows >= min(FIRST_ROWS, max_num_seqs)][:1]
        decode = sorted({*_up_to(decode, reach.num_rows), *first})
    buckets = [Bucket(num_tokens=r, num_rows=r, table_width=table_width, decode_only=True) for r in decode]
    buckets += [Bucket(num_tokens=t, num_rows=rows, table_width=table_width, decode_only=False) for t in tokens]
    if adapters:
        adapted = [dataclasses.replace(bucket, adapted=True) for bucket in buckets]
        buckets = adapted if invariant else [*buckets, *adapted]
    if images:
        imaged = [dataclasses.replace(bucket, imaged=True) for bucket in buckets if not bucket.decode_only]
        buckets = imaged if invariant else [*buckets, *imaged]
    return Ladder(buckets=tuple(sorted(buckets, key=lambda b: (b.num_tokens, not b.decode_only, b.kind))))


def choose_table_width(max_model_len: int, block_size: int, reach: Reach | None) -> int:
    """M: blocks of the longest request that may come, or of a known set's longest, in few sizes that jobs share."""
    width = ceil_div(max_model_len, block_size)
    if reach is not None and reach.request_tokens is not None:
        least = max(reach.request_tokens, _MIN_WIDTH_TOKENS)
        while ceil_div(width, _WIDTH_STEP) * block_size >= least:
            width = ceil_div(width, _WIDTH_STEP)
    return width


def _up_to(sizes: Sequence[int], most: int) -> list[int]:
    """The sizes that hold at most `most`, and the smallest that holds all of it."""
    return [size for before, size in zip((0, *sizes), sizes, strict=False) if before < most]


def _finer(sizes: Sequence[int]) -> list[int]:
    halves = [low + low // 2 for low in sizes if low >= _FINE_TOKENS]
    return sorted({*sizes, *(half for half in halves if half < sizes[-1])})


def _powers(low: int, high: int) -> list[int]:
    """low, 2 low, 4 low, ... and `high` itself, rounded up to a multiple of low."""
    values = []
    while low < high:
        values.append(low)
        low *= 2
    return [*values, round_up(high, values[0]) if values else low]
