"""MediaBook: random histories beside a memory in which each run has the key of its image and number as content."""

import random
from array import array
from collections import Counter

import numpy as np
import pytest

from ferrum_jax.core.request import Request
from ferrum_jax.core.scheduler.media_book import MediaBook, run_keys, tokens_of_images
from ferrum_jax.inputs.prompt import IMAGE_RUN, PlacedImage
from tests.histories import seeded

_NUM_RUNS, _MAX_PATCHES = 7, 6
_LENGTHS = (1, 16, 17, 32, 40)


def _request(rng: random.Random, id: int) -> Request:
    """One or two images of the few that come again and again."""
    images, end = [], 0
    for number in rng.choices(range(5), k=rng.choice([1, 1, 2])):
        kind = ("image", "audio", "video")[number % 3]
        about = {"digest": bytes([number]), "grid": (1, 1, number + 1), "kind": kind, "seconds": number % 3 * 0.5}
        images.append(PlacedImage(start=end + 2, length=_LENGTHS[number], **about))
        end = images[-1].end
    ids = array("i", [0] * (end + 1))
    return Request(id=id, token_ids=ids, num_prompt_tokens=end + 1, max_total_tokens=end + 2, images=tuple(images))


class History:
    """One book, and steps of requests that come, wait, run and go."""

    def __init__(self, seed: int) -> None:
        self.rng, self.book, self.memory = random.Random(seed), MediaBook(_NUM_RUNS, _MAX_PATCHES), dict[int, bytes]()
        self.requests, self.waiting, self.rows = list[Request](), list[Request](), list[Request]()
        self.held, self.encoded, self.seconds = Counter[str](), Counter[str](), 0.0  # by kind; of all

    def step(self) -> None:
        while len(self.waiting) < 3:
            self.requests.append(_request(self.rng, len(self.requests)))
            self.waiting.append(self.requests[-1])
        if self.rng.random() < 0.1:  # it is aborted
            self.book.release(self.waiting.pop(self.rng.randrange(3)))
        others_run = bool(self.rows)
        self.book.begin()
        for request in list(self.waiting):
            before = set(request.image_runs)
            is_row = self.book.hold(request, 0, others_run=others_run)
            new = [request.images[i] for i in request.image_runs.keys() - before]
            self.held.update(image.kind for image in new)
            self.seconds += sum(image.seconds for image in new)
            if is_row:
                self.book.admit(request)
                self.waiting.remove(request)
                self.rows.append(request)
        assert self.rows, "nothing else runs, and the first of all waits"
        orders = [(order.runs, self.requests[order.request].images[order.image]) for order in self.book.take_orders()]
        assert not others_run or sum(image.num_patches for _, image in orders) <= _MAX_PATCHES
        for runs, image in orders:
            self.memory.update(zip(runs, run_keys(image), strict=True))
            self.encoded[image.kind] += 1
        for row in list(self.rows):
            self.compute(row)
        self.book.check_invariants(self.rows)

    def compute(self, row: Request) -> None:
        start = row.num_computed
        row.num_computed = end = min(start + self.rng.randrange(1, 30), len(row.token_ids))
        given = np.array([start]), np.array([end - start]), np.array([0])
        slots = tokens_of_images(*given, [row]).slots.tolist() or [0] * (end - start)
        expected: list[tuple[bytes | None, int]] = [(None, 0)] * (end - start)
        for image in row.images:
            for at in range(max(image.start, start), min(image.end, end)):
                run, place = divmod(at - image.start, IMAGE_RUN)
                expected[at - start] = run_keys(image)[run], place
        assert [(self.memory.get(slot // IMAGE_RUN), slot % IMAGE_RUN) for slot in slots] == expected
        self.book.release_behind(row)
        assert list(row.image_runs) == [i for i, image in enumerate(row.images) if image.end > end]
        if end == len(row.token_ids):
            self.book.release(row)
            self.rows.remove(row)


@pytest.mark.parametrize("seed", range(3))
def test_a_row_reads_what_was_encoded_of_its_images_whoever_came_and_went(seed):
    history = History(seeded(seed))
    for _ in range(150):
        history.step()
        if history.rng.random() < 0.05:
            history.book.forget()
    counts, all_kinds = vars(history.book.counts()), {"image": "image", "sound": "audio", "video_group": "video"}
    for name, kind in all_kinds.items():
        assert counts[f"{name}s_encoded"] == history.encoded[kind] > 9
        assert counts[f"{name}_hits"] == history.held[kind] - history.encoded[kind] > 9
    assert counts["sound_s"] == history.seconds and counts["image_evictions"]
    assert counts["image_runs_live"] + counts["image_runs_cached"] <= _NUM_RUNS
