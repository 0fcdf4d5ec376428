"""A device that computes no model: it remembers which token at which position was written where.

Its tokens are a pure function of the content before them, so equal prompts give equal continuations and
every finished request has one right answer. Each row's reads are checked against its own history, so a
block that is shared, given away or written wrongly shows at once.
"""

import dataclasses
import itertools
from array import array
from collections.abc import Callable, Sequence

import numpy as np

from ferrum_jax.core.drafts.drafts import Draft, Drafts
from ferrum_jax.core.kv_cache.cache_manager import CacheManager
from ferrum_jax.core.outputs import NOT_FINITE
from ferrum_jax.core.plan import Copy, Draw, ShardPlan, StepPlan
from ferrum_jax.core.request import Request
from ferrum_jax.core.scheduler.drafting import Drafting, StepCosts
from ferrum_jax.core.scheduler.flex import StepSizes
from ferrum_jax.core.scheduler.media_book import run_keys
from ferrum_jax.core.scheduler.scheduler import Scheduler, StepsInFlight
from ferrum_jax.engine.of_tokens.kept_experts import KeptExperts
from ferrum_jax.inputs.prompt import IMAGE_RUN, MediaSpan, PlacedImage
from ferrum_jax.inputs.sizes.engine_sizes import EngineSizes

VOCABULARY = 5
_OF_ROWS = (
    "slots",
    "state_slots",
    "source_slots",
    "target_slots",
    "adapter_ids",
    "rope_shifts",
    "clip_slots",
    "masked",
)


def next_token(history: Sequence[int]) -> int:
    """The token after `history`."""
    value = 7
    for token in history:
        value = (value * 31 + token + 1) % 10007
    return value % VOCABULARY


def prompt_of(length: int, stem: int = 0) -> list[int]:
    return [(stem + i * i + i // 3) % 5 for i in range(length)]


def expected_tokens(
    prompt: Sequence[int], max_total_tokens: int, stop_ids: frozenset[int], min_tokens: int
) -> list[int]:
    """Prompt and continuation of an uninterrupted run alone."""
    ids = list(prompt)
    while True:
        ids.append(next_token(ids))
        generated = len(ids) - len(prompt)
        if len(ids) >= max_total_tokens or (ids[-1] in stop_ids and generated > min_tokens):
            return ids


class FakeDevice:
    """The device of one shard: pools of (token, position) instead of KV, token slots, histories as hidden states."""

    def __init__(self, sizes: EngineSizes, num_states: int = 0) -> None:
        self.block_size = sizes.block_size
        self.recurrent: list[list[int] | None] = [None] * num_states  # the tokens that each state stands for
        self.windows = tuple(sizes.windows)
        self.states: list[list[int] | None] = [None] * (sizes.max_cached_prompts + 1)
        shape = (len(self.windows), sizes.num_blocks + 1, sizes.block_size)  # a pool for each cache group
        self.tokens, self.positions = np.full(shape, -1), np.full(shape, -1)
        self.rows = np.full((sizes.max_num_seqs + 1, sizes.max_model_len + 1), -1)
        self.host: dict[tuple[int, int], np.ndarray] = {}  # by group and host id: tokens and positions
        self.num_computed = 0

    def run_turns(self, shard: ShardPlan) -> np.ndarray:
        """The tokens [places] that the step samples. A row goes on behind its end: nobody may take what it draws."""
        if shard.horizon == 1:
            return self.run(shard)
        sampled = np.full((shard.num_rows, shard.horizon), -1, np.int32)
        nothing = {"spills": (), "loads": (), "copies_before": ()}
        for turn in range(turns := max(shard.counts.tolist(), default=0)):
            active = np.flatnonzero(shard.counts > turn)
            ones = np.ones(len(active), np.int32)
            of_rows = {field: getattr(shard, field)[active] for field in _OF_ROWS}
            of_rows |= {"starts": shard.starts[active] + turn, "counts": ones, "samples": ones, "horizon": 1}
            own = dataclasses.replace(shard, **of_rows, block_tables=tuple(t[active] for t in shard.block_tables))
            last = {} if turn == turns - 1 else {"copies_after": ()}
            sampled[active, turn] = self.run(dataclasses.replace(own, **(nothing if turn else {}), **last))
        return sampled.reshape(-1)

    def run(self, shard: ShardPlan) -> np.ndarray:
        """The tokens [places] that the step samples, -1 where it samples none."""
        work = list(zip(shard.slots.tolist(), shard.starts.tolist(), shard.counts.tolist(), strict=True))
        for row, (slot, start, count) in enumerate(work):
            drafts = shard.drafts_of(row)
            self.rows[slot, start + count - len(drafts) : start + count] = drafts
        self.move(shard.spills, shard.loads)
        self._copy(shard.copies_before)
        written: set[tuple[int, int, int]] = set()
        for row, (slot, start, count) in enumerate(work):
            for group, position in itertools.product(range(len(self.windows)), range(start, start + count)):
                id = int(shard.block_tables[group][row, position // self.block_size])
                place = group, id, position % self.block_size
                assert id != 0, "a token is written to the null block"
                assert place not in written, "two rows write to the same place in one step"
                written.add(place)
                self.tokens[place], self.positions[place] = self.rows[slot, position], position
        sampled = np.full(shard.num_places, -1, np.int32)
        drawn: list[tuple[int, int, int]] = []  # slot, position and token
        states: dict[int, list[int]] = {}
        for row, (slot, start, count) in enumerate(work):
            history = self.rows[slot, : start + count]
            for group, tables in enumerate(shard.block_tables):
                self._check_reads(group, history, start, tables[row])
            self.num_computed += count
            if self.recurrent:
                self._recur(int(shard.state_slots[row]), history, start)
            source, target = int(shard.source_slots[row]), int(shard.target_slots[row])
            assert (count == 0) == (source != 0), "a row computes nothing, or computes and samples from a slot"
            num_drafts, place = len(shard.drafts_of(row)), int(shard.first_places[row])
            assert count > num_drafts or not num_drafts, "a row has drafts and no token before them"
            for depth in range(num_drafts + 1) if shard.samples[row] else ():
                end = start + count - num_drafts + depth
                state = self.states[source] if source else history[:end].tolist()
                assert state == history[:end].tolist(), "a row samples from the state of another prompt"
                sampled[place + depth] = next_token(state)
                drawn.append((slot, end, int(sampled[place + depth])))
            if target:
                assert not num_drafts, "the state of a draft is kept as a prompt's"
                assert target not in states, "two rows keep their state in one slot"
                states[target] = history.tolist()
        for slot, position, token in drawn:
            self.rows[slot, position] = token
        for target, state in states.items():  # after every read
            self.states[target] = state
        self._copy(shard.copies_after)
        return sampled

    def move(self, spills: Sequence[Copy], loads: Sequence[Copy]) -> None:
        """To host memory, then back."""
        assert all(copy.source and copy.target for copy in (*spills, *loads)), "a copy from or to the null block"
        for copy in spills:
            block = self.tokens[copy.pool, copy.source], self.positions[copy.pool, copy.source]
            self.host[copy.pool, copy.target] = np.stack(block)
        for copy in loads:
            block = self.host[copy.pool, copy.source]
            self.tokens[copy.pool, copy.target], self.positions[copy.pool, copy.target] = block

    def _copy(self, copies: Sequence[Copy]) -> None:
        """One after the other."""
        for copy in copies:
            assert copy.source and copy.target, "a copy from or to the null block"
            if copy.pool == len(self.windows):
                self.recurrent[copy.target] = self.recurrent[copy.source]
                continue
            for pool in (self.tokens, self.positions):
                pool[copy.pool, copy.target] = pool[copy.pool, copy.source]

    def _recur(self, id: int, history: np.ndarray, start: int) -> None:
        """A state is reset at position 0, and goes on from the very tokens before it everywhere else."""
        assert id, "a row has no state"
        if start:
            assert self.recurrent[id] == history[:start].tolist(), "a row goes on from the state of other tokens"
        self.recurrent[id] = history.tolist()

    def _check_reads(self, group: int, history: np.ndarray, start: int, table: np.ndarray) -> None:
        """Checks the keys that queries from `start` on see."""
        window = self.windows[group]
        oldest = 0 if window is None else max(start - window + 1, 0)
        position = np.arange(oldest, len(history))
        block, offset = table[position // self.block_size], position % self.block_size
        assert np.array_equal(self.positions[group, block, offset], position), "a row reads foreign positions"
        assert np.array_equal(self.tokens[group, block, offset], history[oldest:]), "a row reads foreign tokens"


class FakeRunner:
    """The devices of all shards under one scheduler: what the rows of a plan read and write is checked."""

    def __init__(self, scheduler: Scheduler, sizes: EngineSizes) -> None:
        self.scheduler, self.caches, self.sizes = scheduler, scheduler.caches, sizes
        self.devices = [FakeDevice(sizes, cache.states.pool.num_ids if cache.states else 0) for cache in self.caches]
        self._experts = FakeExperts(sizes) if None in sizes.windows else None
        self._encoded: dict[int, bytes] = {}  # by run of embeddings: the key of what was encoded there

    def write_slot(self, shard: int, slot: int, ids: Sequence[int]) -> None:
        """The tokens of a request that is about to run."""
        self.devices[shard].rows[slot, : len(ids)] = ids

    def encode(self, images: Sequence[tuple[PlacedImage, Sequence[int]]]) -> None:
        """Each image into its runs."""
        for image, runs in images:
            self._encoded.update(zip(runs, run_keys(image), strict=True))

    def run(self, plan: StepPlan) -> np.ndarray:
        """The tokens of all shards' rows, one shard's after the other's."""
        running = {(request.shard, request.slot): request for request in self.scheduler.running()}
        for index, rows in enumerate(plan.shards):
            own = [running[index, slot] for slot in rows.slots.tolist()]
            self._check_images(rows, own)
            if rows.horizon > 1:
                assert not self.scheduler.num_waiting, "a row goes on while others wait"
                assert not any(row.needs_host or row.adapter for row in own)
        sampled = np.concatenate(
            [device.run_turns(rows) for device, rows in zip(self.devices, plan.shards, strict=True)]
        )
        if self._experts is not None:
            self._experts.observe(plan, [device.rows for device in self.devices])
        return sampled

    def collect(self, plan: StepPlan) -> None:
        """What a step computed is on the host."""
        if self._experts is not None:
            self._experts.collect(plan)

    def check_idle(self) -> None:
        """Nothing runs or waits: every hit came with its experts, and nothing is held."""
        metrics = self.scheduler.metrics()
        if self._experts is not None:
            assert self._experts.num_checked == metrics.hit_tokens + metrics.resumed_tokens, "a hit has no experts"
        pools = [pool for cache in self.caches for pool in cache.all_pools()]
        assert all(pool.num_live == 0 for pool in pools), "blocks are live after the last request"

    def _check_images(self, rows: ShardPlan, requests: Sequence[Request]) -> None:
        """Tokens of images are given the embeddings of these; a row holds the images that are not behind it alone."""
        expected: list[tuple[bytes | None, int]] = []
        for request, start, count in zip(requests, rows.starts.tolist(), rows.counts.tolist(), strict=True):
            own = {}
            for image in request.images if start < request.num_prompt_tokens else ():
                keys = run_keys(image)
                own |= {image.start + at: (keys[at // IMAGE_RUN], at % IMAGE_RUN) for at in range(image.length)}
            expected += [own.get(position, (None, 0)) for position in range(start, start + count)]
            left = {index for index, image in enumerate(request.images) if image.end > start + count}
            assert request.image_runs.keys() == left, "a row holds other images than it needs"
        slots = rows.images.slots.tolist() or [0] * len(expected)
        found = [(self._encoded.get(slot // IMAGE_RUN), slot % IMAGE_RUN) for slot in slots]
        assert found == expected, "a token is given another image's embedding"

    def finds(self, request: Request) -> int:
        """How many ids of its shard carry a key of the request's blocks or of its prompt, host memory's too."""
        cache = self.caches[request.shard]
        prompt = dataclasses.replace(request, token_ids=request.token_ids[: request.num_prompt_tokens], keys=[])
        keys = [*cache.keys_of(request), cache.key_of_whole(prompt)]
        pools = [*cache.all_pools(), *(cache.tier.pools if cache.tier else ())]
        return sum(pool.find(key) > 0 for pool in pools for key in keys)

    def published(self) -> dict[tuple[int, int, int], tuple[bytes, bytes]]:
        """Key and content of each published block, by shard, group and id."""
        return {
            (shard, group, id): (key, self.devices[shard].tokens[group, id].tobytes())
            for shard, cache in enumerate(self.caches)
            for group, pool in enumerate(cache.pools)
            for id in range(pool.num_ids)
            if (key := pool.key_of(id)) is not None
        }

    def check_unchanged(self, before: dict[tuple[int, int, int], tuple[bytes, bytes]]) -> None:
        for place, (key, content) in self.published().items():
            was = before.get(place)
            assert was is None or was[0] != key or was[1] == content, f"published block {place} was written"


class FakeExperts:
    """A token and its position in place of experts; checks those that come with a hit against the row's history."""

    def __init__(self, sizes: EngineSizes) -> None:
        self._kept = KeptExperts(sizes, width=2, dtype=np.dtype(np.int16))
        self._on_their_way: dict[int, tuple[np.ndarray, dict[tuple[int, int], np.ndarray]]] = {}  # by step
        self.num_checked = 0  # tokens

    def observe(self, plan: StepPlan, rows: Sequence[np.ndarray]) -> None:
        """A step was dispatched. rows: the tokens of each shard's slots."""
        found = [np.zeros((0, 2), np.int16)]
        wanted: dict[tuple[int, int], np.ndarray] = {}
        for index, shard in enumerate(plan.shards):
            new = {slot for at, slot, _ in plan.admitted if at == index}
            work = zip(shard.slots.tolist(), shard.starts.tolist(), shard.counts.tolist(), strict=True)
            for row, (slot, start, count) in enumerate(work):
                computed, drafts = _experts_of(rows[index][slot], start, start + count), shard.drafts_of(row)
                computed[count - len(drafts) :, 0] = drafts  # where other tokens may have been drawn since
                found.append(computed)
                if slot in new:
                    wanted[index, row] = _experts_of(rows[index][slot], 0, start)
        self._on_their_way[plan.step] = np.concatenate(found), wanted

    def collect(self, plan: StepPlan) -> None:
        """What it computed is on the host."""
        found, wanted = self._on_their_way.pop(plan.step)
        hits = self._kept.follow(plan, found, wanted)
        assert hits.keys() == wanted.keys(), "a row's hit is not looked up"
        for place, expected in wanted.items():
            assert np.array_equal(hits[place], expected), "a hit comes with the experts of other tokens"
            self.num_checked += len(expected)


def _experts_of(tokens: np.ndarray, start: int, end: int) -> np.ndarray:
    """[end - start, 2] int16: tokens and positions."""
    return np.stack([tokens[start:end], np.arange(start, end)], axis=1).astype(np.int16)


class FakeDrafts:
    """Drafts that learn nothing."""

    bytes = 0

    def forget(self, request: Request) -> None: ...

    def learn(self, token_ids: Sequence[int], num_prompt_tokens: int, salt: bytes) -> None: ...


class KnownDrafts(FakeDrafts):
    """Drafts that are known to come true, or not to.

    kind: "right"; "wrong", where none does; "mixed", where one in four is wrong.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def propose(self, request: Request, most: int) -> Draft:
        ids = request.token_ids.tolist()
        for _ in range(most):
            is_wrong = self.kind == "wrong" or (self.kind == "mixed" and sum(ids) % 4 == 0)
            ids.append((next_token(ids) + is_wrong) % VOCABULARY)
        found = ids[len(request.token_ids) :]
        return Draft(token_ids=found, confidences=[1.0] * len(found))


def drafting_of(source: Drafts, *, num_tokens: int, num_places: int, most: int = 6) -> Drafting:
    """Drafting for which each token that comes true pays."""
    sizes = tuple((size, 1.0) for size in sorted({max(1, num_tokens // 2), num_tokens}))
    costs = [StepCosts(num_rows=1, bare=1.0, sizes=sizes)]
    return Drafting(source, most=most, num_places=num_places, num_tokens=num_tokens, costs=costs)


class Engine:
    """The engine's loop around a scheduler and a fake device, one step ahead of its commits."""

    def __init__(
        self,
        *,
        num_blocks: int = 32,
        block_size: int = 4,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 16,
        max_model_len: int = 64,
        max_cached_prompts: int = 0,
        min_cached_prompt_tokens: int = 1,
        windows: Sequence[int | None] = (None,),
        max_snapshots: int | None = None,
        num_host_blocks: int = 0,
        num_image_runs: int = 0,
        enabled: bool = True,
        window_blocks: int | None = None,
        num_shards: int = 1,
        drafts: str | Drafts | None = None,
        steps: StepSizes | None = None,
        horizon: int = 1,
    ) -> None:
        """window_blocks: of the pools of groups with a window, where they are not `num_blocks` as well. drafts: where
        they come from, or the kind of `KnownDrafts`.

        Sizes are those of each of `num_shards` shards; `cache` and `device` are the first one's.
        """
        sizes = EngineSizes(
            block_size=block_size,
            group_blocks=[num_blocks if w is None else window_blocks or num_blocks for w in windows],
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            windows=windows,
            num_host_blocks=num_host_blocks,
            max_cached_prompts=max_cached_prompts,
            min_cached_prompt_tokens=min_cached_prompt_tokens,
            max_snapshots=max_snapshots,
            state_bytes=1000,
            num_image_runs=num_image_runs,
            max_image_patches=6,
        )
        self.caches = [CacheManager(sizes, enabled=enabled) for _ in range(num_shards)]
        budget = max_num_batched_tokens
        source = KnownDrafts(drafts) if isinstance(drafts, str) else drafts
        drafting = source and drafting_of(source, num_tokens=budget, num_places=budget)
        self.scheduler = Scheduler(self.caches, drafting or None, steps)
        self.scheduler.limit(None, [(max_num_seqs, Draw.GREEDY, horizon)])
        self.after_token: Callable[[Request], None] = lambda request: None  # called when one got a token and goes on
        self.runner = FakeRunner(self.scheduler, dataclasses.replace(sizes, num_shards=num_shards))
        self.devices = self.runner.devices
        self.cache, self.device = self.caches[0], self.devices[0]
        self.requests: dict[int, Request] = {}
        self.plans: list[StepPlan] = []
        self._in_flight: StepsInFlight[tuple[StepPlan, np.ndarray]] = StepsInFlight()

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        stop_ids: Sequence[int] = (),
        min_tokens: int = 0,
        priority: int = 0,
        takes_hits: bool = True,
        salt: bytes = b"",
        needs_host: bool = False,
        adapter: str = "",
        num_choices: int = 1,
        media: Sequence[MediaSpan] = (),
        images: Sequence[PlacedImage] = (),
    ) -> Request:
        request = Request(
            id=len(self.requests),
            token_ids=array("i", prompt),
            num_prompt_tokens=len(prompt),
            max_total_tokens=len(prompt) + max_tokens,
            min_tokens=min_tokens,
            stop_ids=frozenset(stop_ids),
            priority=priority,
            takes_hits=takes_hits,
            cache_salt=salt,
            draw=Draw.GREEDY,
            needs_host=needs_host,
            adapter=adapter,
            num_choices=num_choices,
            media=(*media, *(MediaSpan(kind=i.kind, digest=i.digest, start=i.start, length=i.length) for i in images)),
            images=tuple(images),
        )
        self.scheduler.add(request)
        self.requests[request.id] = request
        return request

    def step(self) -> list[tuple[Request, int]]:
        """Plan and dispatch the next step, then commit the one before it, or before that where drafts want it."""
        got = self.commit() if self.scheduler.waits_for_commit else []
        due = self._in_flight.advance(self._dispatch())
        return got + self._commit(*due) if due else got

    def dispatch(self) -> None:
        """Plan and run the next step, if there is one."""
        if self.scheduler.waits_for_commit:
            self.commit()
        step = self._dispatch()
        if step is not None:
            self._in_flight.append(step)

    def _dispatch(self) -> tuple[StepPlan, np.ndarray] | None:
        published = self.runner.published()
        plan = self.scheduler.schedule()
        step = None
        if plan is not None:
            self.plans.append(plan)
            step = plan, self._run(plan)
        self.scheduler.check_invariants()
        self.runner.check_unchanged(published)
        return step

    def _run(self, plan: StepPlan) -> np.ndarray:
        """The tokens of all shards' rows, one shard's after the other's."""
        for shard, slot, request_id in plan.admitted:
            self.runner.write_slot(shard, slot, self.requests[request_id].token_ids)
        self.runner.encode([(self.requests[order.request].images[order.image], order.runs) for order in plan.encodes])
        return self.runner.run(plan)

    def commit(self) -> list[tuple[Request, int]]:
        """Commit the oldest step in flight."""
        return self._commit(*self._in_flight.popleft())

    def _commit(self, plan: StepPlan, sampled: np.ndarray) -> list[tuple[Request, int]]:
        self.runner.collect(plan)
        got: list[tuple[Request, int]] = []
        some: list[tuple[Request, int]] | None = self.scheduler.commit(plan, sampled)
        while some is not None:
            for request, _ in some:
                if request.finish_reason is None:
                    self.after_token(request)
                elif request.finish_reason == "error":  # looked at now: a twin may publish its own blocks in a moment
                    assert not self.runner.finds(request), f"something of request {request.id} has a key after its end"
            got += some
            some = self.scheduler.commit_accepted()
        self.scheduler.check_invariants()
        return got

    def damage(self, choose: Callable[[int], int]) -> None:
        """Make one draw of the last step in flight not finite, if there is one. choose: which, by their number."""
        if not self._in_flight:
            return
        _, sampled = self._in_flight[-1]
        rows = np.flatnonzero(sampled >= 0)
        if len(rows):
            sampled[rows[choose(len(rows))]] = NOT_FINITE

    @property
    def is_idle(self) -> bool:
        return not self._in_flight and not self.scheduler.has_unfinished

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def drain(self) -> int:
        """Run until nothing is left; every request that was not ended from outside is then right. How many steps."""
        # The oldest row is never preempted and gets a token of each step, so a request costs its tokens at the most;
        # twice that, for the steps a row waits for the host tier or for those in flight.
        max_steps = 100 + 2 * sum(r.max_total_tokens for r in self.requests.values() if r.finish_reason is None)
        steps = 0
        while steps < max_steps and not self.is_idle:
            self.step()
            steps += 1
        assert self.is_idle, f"requests are unfinished after {max_steps} steps"
        for request in self.requests.values():
            self.check(request)
        self.runner.check_idle()
        return steps

    def hit(self, prompt: list[int], max_tokens: int = 2) -> int:
        """How many tokens of a prompt are hit when it runs alone."""
        request = self.add(prompt, max_tokens)
        self.drain()
        return request.num_cached_tokens

    def check(self, request: Request) -> None:
        """The request ended as it does when it runs alone, or is a prefix of that if it was ended from outside."""
        prompt = request.token_ids[: request.num_prompt_tokens]
        expected = expected_tokens(prompt, request.max_total_tokens, request.stop_ids, request.min_tokens)
        if request.finish_reason in ("stop", "length") and not isinstance(request.stop_reason, str):
            assert request.token_ids.tolist() == expected, f"request {request.id} has other tokens than alone"
        else:
            assert request.token_ids.tolist() == expected[: len(request.token_ids)], f"request {request.id} went astray"
