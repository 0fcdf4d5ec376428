"""RunningRows: who holds which row slot, and how far each has come, in arrays indexed by slot.

`build_shard` gives the rows chosen for a step as the arrays of its order, `append_tokens` takes what they drew.

A decoding row computes one token a step, or one in each of several forwards, so a step of decodes is planned from these
arrays without a loop over rows. A slot's epoch changes whenever a row leaves it, so a step in flight can tell whether a
row of its plan is still the same admission.
"""

import bisect
from collections.abc import Mapping, Sequence

import numpy as np

from ferrum_jax.core.kv_cache.cache_manager import CacheManager
from ferrum_jax.core.kv_cache.id_pool import IdPool
from ferrum_jax.core.outputs import NOT_FINITE, NOT_FINITE_REASON
from ferrum_jax.core.plan import MAX_HORIZON, NO_IMAGE_TOKENS, Draw, ShardPlan
from ferrum_jax.core.request import FLEX, Request
from ferrum_jax.core.scheduler.media_book import clip_slot, shifts_of, tokens_of_images
from ferrum_jax.inputs.prompt import rope_shift

_Place = tuple[int, int, int]  # priority, request id, slot: the order in which rows are served


class RunningRows:
    """At most `max_num_seqs` admitted requests; slot 0 is null."""

    def __init__(self, max_num_seqs: int) -> None:
        self.slots = IdPool(max_num_seqs + 1)
        self.requests: list[Request | None] = [None] * (max_num_seqs + 1)
        self.computed = np.zeros(max_num_seqs + 1, np.int32)  # tokens whose KV is dispatched
        self.limits = np.zeros(max_num_seqs + 1, np.int32)  # max_total_tokens
        self.epochs = np.zeros(max_num_seqs + 1, np.int64)
        self.masked = np.zeros(max_num_seqs + 1, bool)  # where its request is constrained
        self.draws = np.zeros(max_num_seqs + 1, np.int8)
        self.draws_alone = np.zeros(max_num_seqs + 1, np.int8)  # FULL with an adapter, or where the host looks on
        self.adapter_ids = np.zeros(max_num_seqs + 1, np.int32)
        self.rope_shifts = np.zeros(max_num_seqs + 1, np.int32)  # of tokens behind all images of the prompt
        self.clip_slots = np.zeros(max_num_seqs + 1, np.int32)
        self._prefilling: list[_Place] = []  # both sorted
        self._decoding: list[_Place] = []
        self._decode_slots: np.ndarray | None = None
        self._decode_requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def num_prefilling(self) -> int:
        return len(self._prefilling)

    def insert(self, request: Request, slot: int, num_computed: int) -> None:
        """Make the request a prefilling row at `slot`, which its caller acquired."""
        request.slot = slot
        request.num_computed = num_computed
        self.requests[slot] = request
        self.computed[slot] = num_computed
        self.limits[slot] = request.max_total_tokens
        self.masked[slot] = request.is_constrained
        self.draws[slot] = request.draw
        self.draws_alone[slot] = Draw.FULL if request.needs_host or request.adapter else request.draw
        self.adapter_ids[slot] = request.adapter_id
        self.rope_shifts[slot] = rope_shift(request.images, request.num_prompt_tokens)
        self.clip_slots[slot] = clip_slot(request)
        bisect.insort(self._prefilling, _place(request))

    def start_decoding(self, request: Request) -> None:
        """The last chunk of the request's known tokens is dispatched."""
        _remove(self._prefilling, _place(request))
        bisect.insort(self._decoding, _place(request))
        self._decode_slots = None

    def extend(self, request: Request) -> None:
        """The decoding row's request has more known tokens than the one in flight: they are computed as a chunk."""
        if _remove(self._decoding, _place(request)):
            bisect.insort(self._prefilling, _place(request))
            self._decode_slots = None

    def remove(self, request: Request) -> None:
        """Take the row off and free its slot; plans in flight see another epoch."""
        place = _place(request)
        if not _remove(self._decoding, place):
            assert _remove(self._prefilling, place), f"request {request.id} is not running"
        self._decode_slots = None
        slot = request.slot
        self.requests[slot] = None
        self.epochs[slot] += 1
        self.slots.release((slot,))
        request.slot = 0
        request.num_computed = 0

    def prefilling(self, *, without_flex: bool = False) -> list[Request]:
        """In the order in which they are served."""
        places = self._prefilling[: _num_before_flex(self._prefilling)] if without_flex else self._prefilling
        return [self.at(slot) for _, _, slot in places]

    def decoding(self, *, without_flex: bool = False) -> tuple[np.ndarray, list[Request]]:
        """Slots [rows] int32 and requests of the decoding rows, in the order in which they are served."""
        if self._decode_slots is None:
            self._decode_slots = np.array([slot for _, _, slot in self._decoding], np.int32)
            self._decode_requests = [self.at(slot) for _, _, slot in self._decoding]
        if without_flex:
            count = _num_before_flex(self._decoding)
            return self._decode_slots[:count], self._decode_requests[:count]
        return self._decode_slots, self._decode_requests

    def last(self) -> Request:
        """The latest row of the lowest priority: the one to preempt."""
        places = [places[-1] for places in (self._prefilling, self._decoding) if places]
        return self.at(max(places)[2])

    @property
    def has_live(self) -> bool:
        """Whether a row is not FLEX."""
        return any(places and places[0][0] < FLEX for places in (self._prefilling, self._decoding))

    @property
    def has_flex(self) -> bool:
        return any(places and places[-1][0] >= FLEX for places in (self._prefilling, self._decoding))

    def at(self, slot: int) -> Request:
        request = self.requests[slot]
        assert request is not None, f"row slot {slot} is empty"
        return request

    def all(self) -> list[Request]:
        return [self.at(slot) for _, _, slot in sorted(self._prefilling + self._decoding)]

    def check_invariants(self) -> None:
        rows = self.all()
        self.slots.check_invariants({request.slot: 1 for request in rows})
        assert len(rows) == sum(request is not None for request in self.requests), "a slot is held by no list of rows"
        for request in rows:
            assert self.at(request.slot) is request, f"request {request.id} is not at its slot"
            assert self.computed[request.slot] == request.num_computed, f"progress of request {request.id} differs"
        for _, _, slot in self._prefilling:
            assert self.computed[slot] < len(self.at(slot).token_ids), f"slot {slot} prefills nothing"
        for _, _, slot in self._decoding:
            ahead = self.computed[slot] - len(self.at(slot).token_ids)
            assert -1 <= ahead < 2 * MAX_HORIZON, f"slot {slot} decodes {ahead} tokens ahead of the host"


def _num_before_flex(places: list[_Place]) -> int:
    return bisect.bisect_left(places, (FLEX,))


def _place(request: Request) -> _Place:
    return request.priority, request.id, request.slot


def _remove(places: list[_Place], place: _Place) -> bool:
    index = bisect.bisect_left(places, place)
    found = index < len(places) and places[index] == place
    if found:
        del places[index]
    return found


def append_tokens(
    requests: list[Request],
    samples: np.ndarray,
    positions: np.ndarray,
    current: np.ndarray,
    token_ids: np.ndarray,
    awaited: set[int],
    places: np.ndarray,
) -> list[tuple[Request, int]]:
    """Append the rows' tokens to the requests that still want them, and mark those that end by theirs.

    One whose row has NOT_FINITE in place of a token ends with an error.

    samples, positions, current, token_ids: [rows]; whether a row drew a token, the position that it takes, whether its
    request still runs as the admission that the step was planned for, and the token. One whose position has a token by
    now, which its grammar forced, is dropped. awaited: ids of preempted requests whose token this may be.
    Returns the requests that the rows were for, each with the place [rows] of its token.
    """
    got = []
    columns = (column.tolist() for column in (samples, positions, current, token_ids, places))
    for request, draws, position, is_current, token, place in zip(requests, *columns, strict=True):
        if not draws or position < len(request.token_ids):
            continue
        if not is_current:
            if request.id not in awaited:
                continue  # it ended while this step was in flight
            awaited.remove(request.id)
        got.append((request, place))
        if token == NOT_FINITE:
            request.finish_reason, request.stop_reason = "error", NOT_FINITE_REASON
            continue
        ids = request.token_ids
        ids.append(token)
        if token in request.stop_ids and len(ids) - request.num_prompt_tokens > request.min_tokens:
            request.finish_reason = "stop"
            request.stop_reason = None if token in request.end_ids else token
        elif len(ids) >= request.max_total_tokens:
            request.finish_reason = "length"
    return got


def build_shard(
    cache: CacheManager,
    slots: np.ndarray,
    starts: np.ndarray,
    chunks: list[tuple[Request, int]],
    rows: RunningRows,
    drafts: Sequence[Sequence[int]],
    turns: np.ndarray | None = None,
    horizon: int = 1,
) -> ShardPlan:
    """The plan of decodes, at slots and positions [rows], and then of chunks, each of so many tokens.

    drafts: of each row, behind its tokens. turns: forwards of each decode [rows] in a step with a horizon; None is one.
    What the cache keeps of the rows and moves for them is ordered with it.
    """
    num_decodes, of_chunks = len(slots), [request for request, _ in chunks]
    counts = np.ones(num_decodes, np.int32) if turns is None else turns
    samples, shifts = counts, rows.rope_shifts[slots]
    drafted = np.array([len(row) for row in drafts], np.int32)
    images = NO_IMAGE_TOKENS
    if chunks:
        lengths = [count for _, count in chunks]
        ends = [request.num_computed + count == len(request.token_ids) for request, count in chunks]
        slots = np.concatenate([slots, np.array([request.slot for request in of_chunks], np.int32)])
        starts = np.concatenate([starts, np.array([request.num_computed for request in of_chunks], np.int32)])
        counts, samples = (np.concatenate([counts, np.array(tail, np.int32)]) for tail in (lengths, ends))
        shifts = np.concatenate([shifts, shifts_of(starts[num_decodes:], of_chunks)])
        images = tokens_of_images(starts, counts + drafted, shifts, [*[None] * num_decodes, *of_chunks])
    counts, samples = counts + drafted, samples + drafted
    none = np.zeros(len(slots), np.int32)
    followed = (drafted > 0) | (np.arange(len(slots)) < num_decodes)
    cache.follow(slots[followed], (starts + counts)[followed])
    for request, count in chunks:
        cache.keep(request, request.num_computed + count)
    transfers = cache.take_transfers()
    needs_all = drafted.any() or transfers.sources or transfers.targets
    return ShardPlan(
        slots=slots,
        starts=starts,
        counts=counts,
        samples=samples,
        block_tables=cache.blocks.gather(slots),
        state_slots=cache.state_slots(slots),
        source_slots=_by_row(transfers.sources, slots) if transfers.sources else none,
        target_slots=_by_row(transfers.targets, slots) if transfers.targets else none,
        adapter_ids=rows.adapter_ids[slots],
        rope_shifts=shifts,
        clip_slots=rows.clip_slots[slots],
        masked=rows.masked[slots],
        draw=Draw.FULL if needs_all else Draw(rows.draws[slots].max(initial=Draw.GREEDY)),
        drafts=tuple(token for row in drafts for token in row),
        horizon=horizon,
        images=images,
        spills=transfers.spills,
        loads=transfers.loads,
        copies_before=tuple(transfers.copies_before),
        copies_after=tuple(transfers.copies_after),
    )


def _by_row(prompt_slots: Mapping[int, int], slots: np.ndarray) -> np.ndarray:
    """[rows] int32: the prompt slot of each row, 0 where it has none."""
    return np.array([prompt_slots.get(slot, 0) for slot in slots.tolist()], np.int32)
