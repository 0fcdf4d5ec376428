"""MediaBook: which images have their embeddings on the device, and which are encoded in the next step.

A sound, or a group of a video's frames, is an image here, and counted by its kind.
The device keeps embeddings in runs of RUN tokens. A run is an id of an `IdPool`, keyed by its image's digest and its
number: held while a request's prompt needs it, then cached, least recently used first. What stands beside a prompt,
as a clip that its layers attend to, is one run, which all of its tokens need. A request becomes a row once all
images of its prompt that are not behind it are held; those that are not there are encoded before that step, a few
images a step where others run. No request with images passes one that waits for a run or for its turn. Rows give each
image back when its last token is computed, and all of them when they leave.

Why an image may be held before it is encoded: steps run on the device in the order of their plans.
"""

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from ferrum_jax.core.kv_cache.id_pool import IdPool
from ferrum_jax.core.plan import NO_IMAGE_TOKENS, EncodeOrder, ImageTokensPlan
from ferrum_jax.core.request import Request
from ferrum_jax.inputs.prompt import IMAGE_RUN as RUN
from ferrum_jax.inputs.prompt import PlacedImage, rope_positions, rope_shift, seen_ends


class MediaBook:
    """The runs of one engine, which all of its data shards share."""

    def __init__(self, num_runs: int = 0, max_patches: int = 0) -> None:
        """num_runs: 0 of an engine that takes no images. max_patches: that a step encodes while rows run."""
        self._pool = IdPool(num_runs + 1)
        self._max_patches = max_patches
        self._budget = 0
        self._orders: list[EncodeOrder] = []
        self._one_waits = False
        self._early: dict[int, Request] = {}  # by id: those that hold images and are no rows yet
        self._encoded: Counter[str] = Counter()  # by kind
        self._hits: Counter[str] = Counter()
        self._sound_s = 0.0

    def begin(self) -> None:
        """A step is planned."""
        self._budget, self._one_waits = self._max_patches, False

    def hold(self, request: Request, num_hit: int, *, others_run: bool) -> bool:
        """Whether the images behind the request's first `num_hit` tokens are all held; holds as many as it can.

        others_run: the step has rows, so it encodes no more than its budget.
        """
        missing = [
            index
            for index, image in enumerate(request.images)
            if (image.is_beside or image.end > num_hit) and index not in request.image_runs
        ]
        if not missing:
            return True
        if self._one_waits:
            return False
        self._early[request.id] = request
        self._one_waits = not all(self._hold_one(request, index, others_run) for index in missing)
        return not self._one_waits

    def _hold_one(self, request: Request, index: int, others_run: bool) -> bool:
        image, pool = request.images[index], self._pool
        keys = run_keys(image)
        found = pool.find_run(keys)
        if len(found) == len(keys):
            for run in found:
                pool.retain(run)
            request.image_runs[index] = found
            self._count(image, self._hits)
            return True
        if others_run and image.num_patches > self._budget:
            return False
        if found:  # what is left of an image that was evicted in part
            for key in keys:
                pool.unkey(key)
        runs = self._acquire(len(keys), request)
        if runs is None:
            return False
        pool.publish_all(runs, keys)
        request.image_runs[index] = runs
        self._orders.append(EncodeOrder(request=request.id, image=index, runs=tuple(runs)))
        self._budget -= image.num_patches
        self._count(image, self._encoded)
        return True

    def _count(self, image: PlacedImage, counts: Counter[str]) -> None:
        counts[image.kind] += 1
        self._sound_s += image.seconds

    def _acquire(self, count: int, request: Request) -> list[int] | None:
        """Runs for an image; those that wait behind its request give theirs back, where it takes that."""
        runs = self._pool.acquire(count)
        if runs is None:
            for other in [other for other in self._early.values() if other is not request]:
                self.release(other)
            runs = self._pool.acquire(count)
        return runs

    def take_orders(self) -> tuple[EncodeOrder, ...]:
        """Images to encode before the planned step."""
        taken, self._orders = tuple(self._orders), []
        return taken

    def admit(self, request: Request) -> None:
        """It is a row from now on."""
        self._early.pop(request.id, None)

    def release(self, request: Request) -> None:
        """Gives back all images that the request holds."""
        self._early.pop(request.id, None)
        for runs in request.image_runs.values():
            self._pool.release(reversed(runs))
        request.image_runs.clear()

    def release_behind(self, request: Request) -> None:
        """Gives back those whose last token the next plan computes."""
        images = request.images
        behind = (i for i in request.image_runs if not images[i].is_beside and images[i].end <= request.num_computed)
        for index in list(behind):
            self._pool.release(reversed(request.image_runs.pop(index)))

    def forget(self) -> None:
        """No image is found any more; rows keep the images that they hold."""
        self._pool.unkey_all()

    @property
    def has_orders(self) -> bool:
        """Whether something is encoded before the step that is planned."""
        return bool(self._orders)

    @property
    def num_tokens(self) -> int:
        """Tokens of images that there is room for."""
        return (self._pool.num_ids - 1) * RUN

    def counts(self) -> dict[str, float]:
        """The counters so far, with the gauges of this moment. video_groups: of frames that go to the tower.

        sound_s: seconds of sounds that were encoded or found. Runs are those of all kinds.
        """
        pool = self._pool
        return {
            "images_encoded": self._encoded["image"],
            "image_hits": self._hits["image"],
            "sounds_encoded": self._encoded["audio"],
            "sound_hits": self._hits["audio"],
            "video_groups_encoded": self._encoded["video"],
            "video_group_hits": self._hits["video"],
            "sound_s": round(self._sound_s, 3),
            "image_evictions": pool.evictions,
            "image_runs_live": pool.num_live,
            "image_runs_cached": pool.num_cached,
        }

    def check_invariants(self, rows: Sequence[Request]) -> None:
        """Prove the book. rows: the running ones."""
        holders: dict[int, int] = {}
        for request in {request.id: request for request in (*rows, *self._early.values())}.values():
            for runs in request.image_runs.values():
                for run in runs:
                    holders[run] = holders.get(run, 0) + 1
        self._pool.check_invariants(holders)


def run_keys(image: PlacedImage) -> list[bytes]:
    """The keys of an image's runs."""
    return [
        blake2b(image.digest, digest_size=16, salt=index.to_bytes(8, "little")).digest()
        for index in range(image.num_runs)
    ]


def clip_slot(request: Request) -> int:
    """The id of what stands beside all tokens of a request, 0 where nothing does."""
    return next((request.image_runs[i][0] for i, image in enumerate(request.images) if image.is_beside), 0)


def tokens_of_images(
    starts: np.ndarray, counts: np.ndarray, shifts: np.ndarray, requests: Sequence[Request | None]
) -> ImageTokensPlan:
    """The image input of a step's tokens; None where none is an image's.

    starts, counts, shifts: [rows]. requests: of rows that compute chunks, None of those that decode.
    """
    spans = list(zip(starts.tolist(), counts.tolist(), requests, strict=True))
    if not any(
        image.start < start + count and image.end > start
        for start, count, request in spans
        for image in (() if request is None else request.images)
    ):
        return NO_IMAGE_TOKENS
    slots, positions, ends = [], [], []
    for (start, count, request), shift in zip(spans, shifts.tolist(), strict=True):
        if request is None or not request.images:
            slots.append(np.zeros(count, np.int32))
            ends.append(np.zeros(count, np.int32))
            positions.append(np.broadcast_to(np.arange(start + shift, start + shift + count), (3, count)))
        else:
            slots.append(_embedding_slots(request, start, start + count))
            ends.append(seen_ends(request.images, start, start + count))
            positions.append(rope_positions(request.images, start, start + count))
    return ImageTokensPlan(
        slots=np.concatenate(slots),
        positions=np.concatenate(positions, axis=1).astype(np.int32),
        ends=np.concatenate(ends),
    )


def _embedding_slots(request: Request, start: int, stop: int) -> np.ndarray:
    """[stop - start] int32: where each token's embedding lies, 0 for tokens of text."""
    found = np.zeros(stop - start, np.int32)
    for index, image in enumerate(request.images):
        first, last = max(image.start, start), min(image.end, stop)
        if first < last:
            places = image.embeddings_of(first - image.start, last - image.start)
            runs = np.array(request.image_runs[index], np.int32)
            found[first - start : last - start] = np.where(places < 0, 0, runs[places // RUN] * RUN + places % RUN)
    return found


def shifts_of(starts: np.ndarray, requests: Sequence[Request]) -> np.ndarray:
    """[rows] int32: what rotary positions of rows' tokens from `starts` on are more than their positions."""
    each = [rope_shift(request.images, start) for start, request in zip(starts.tolist(), requests, strict=True)]
    return np.array(each, np.int32)
