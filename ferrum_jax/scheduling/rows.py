"""RunningRows: who holds which row slot, and how far each has come, in arrays indexed by slot.

A decoding row computes one token a step, so a step of decodes is planned from these arrays without a
loop over rows. A slot's epoch changes whenever a row leaves it, so a step in flight can tell whether a
row of its plan is still the same admission.
"""

from __future__ import annotations

import bisect

import numpy as np

from ferrum_jax.request import Request
from ferrum_jax.scheduling.id_pool import IdPool

_Place = tuple[int, int, int]  # priority, request id, slot: the order in which rows are served


class RunningRows:
    """At most `max_num_seqs` admitted requests; slot 0 is null."""

    def __init__(self, max_num_seqs: int) -> None:
        self.slots = IdPool(max_num_seqs + 1)
        self.requests: list[Request | None] = [None] * (max_num_seqs + 1)
        self.computed = np.zeros(max_num_seqs + 1, np.int32)  # tokens whose KV is dispatched
        self.limits = np.zeros(max_num_seqs + 1, np.int32)  # max_total_tokens
        self.epochs = np.zeros(max_num_seqs + 1, np.int64)
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
        bisect.insort(self._prefilling, _place(request))

    def start_decoding(self, request: Request) -> None:
        """The last chunk of the request's known tokens is dispatched."""
        _remove(self._prefilling, _place(request))
        bisect.insort(self._decoding, _place(request))
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

    def prefilling(self) -> list[Request]:
        """In the order in which they are served."""
        return [self.at(slot) for _, _, slot in self._prefilling]

    def decoding(self) -> tuple[np.ndarray, list[Request]]:
        """Slots [rows] int32 and requests of the decoding rows, in the order in which they are served."""
        if self._decode_slots is None:
            self._decode_slots = np.array([slot for _, _, slot in self._decoding], np.int32)
            self._decode_requests = [self.at(slot) for _, _, slot in self._decoding]
        return self._decode_slots, self._decode_requests

    def last(self) -> Request:
        """The latest row of the lowest priority: the one to preempt."""
        places = [places[-1] for places in (self._prefilling, self._decoding) if places]
        return self.at(max(places)[2])

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
            assert -1 <= ahead <= 1, f"slot {slot} decodes {ahead} tokens ahead of the host"


def _place(request: Request) -> _Place:
    return request.priority, request.id, request.slot


def _remove(places: list[_Place], place: _Place) -> bool:
    index = bisect.bisect_left(places, place)
    found = index < len(places) and places[index] == place
    if found:
        del places[index]
    return found
