"""Programs: all that an engine calls, by what it is for, and as executables.

Bucket       the forward of a step
RowBucket    what samples the rows of one
LaunchBucket both of a decode step
DraftBucket  what predicts one token more behind a forward
a name       what stands beside steps: prompt log-probabilities, the write of a row slot, copies, fresh pools
"""

import dataclasses
import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from ferrum_jax.core.plan import StepPlan
from ferrum_jax.models.sharding import describe
from ferrum_jax.runtime.buckets import FIRST_TOKENS, Bucket, DraftBucket, Ladder, LaunchBucket, RowBucket
from ferrum_jax.runtime.compile.compile import Program, make_all
from ferrum_jax.runtime.compile.deferred import DeferredExecutable, Executable, Prepared
from ferrum_jax.runtime.compile.executable_store import ExecutableCache, ExecutableStore
from ferrum_jax.runtime.compile.worth import Saving, Worth
from ferrum_jax.runtime.draft import trace_draft
from ferrum_jax.runtime.layer_calls import run_layer
from ferrum_jax.runtime.layout import Layout
from ferrum_jax.runtime.lora.adapter_slots import trace_fresh_adapters, trace_write_adapter
from ferrum_jax.runtime.media_encoders.clip_slots import ClipSlots, trace_encode_clip
from ferrum_jax.runtime.media_encoders.image_slots import ImageSlots, trace_encode, trace_fresh_images
from ferrum_jax.runtime.media_encoders.packing import call_name
from ferrum_jax.runtime.pools.copies import trace_copies
from ferrum_jax.runtime.pools.pools import are_untouched, trace_fresh
from ferrum_jax.runtime.sample import (
    trace_launch,
    trace_sample,
    trace_score,
    trace_write_drafts,
    trace_write_masks,
    trace_write_slot,
)
from ferrum_jax.runtime.step import trace_forward
from ferrum_jax.runtime.step_options import compiler_options

StepPart = Bucket | RowBucket | LaunchBucket | DraftBucket
Part = StepPart | str
DECODES_AT_ONCE = 20_000_000  # weights of layers from which on 112 tokens of padding take a twentieth of a second
MIN_PIECE_BYTES = 192 << 20  # whose reading takes 8 ms; between two pieces cores stand still for 0.1 ms
TOKENS_AS_BYTES = 4  # of a step: with so many a layer takes as long for its arithmetic as for its bytes
LAUNCH_S = 1e-4  # that a step saves which is one launch, without branches where it samples
HORIZON_S = 2e-4  # that a forward saves which the device begins by itself
OF_SCORES = ("score", "score_all")
OTHERS = (*OF_SCORES, "write_slot", "write_masks", "write_drafts", "copy_blocks", "fresh_pools")
OF_ADAPTERS = ("write_adapter", "fresh_adapters")  # of an engine that has slots for them
OF_IMAGES = "fresh_images"  # of one that has slots for images, with an encoder for each number of patches
# For TPUs a forward takes as long as 12 small programs, and one more for 64 tokens; what samples, as long as 8.
_FORWARD_EFFORT, _EFFORT_TOKENS, _SAMPLE_EFFORT, _LAUNCH_EFFORT = 12, 64, 8, 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Executables:
    """The executable of each part of an engine, those of steps by bucket."""

    forwards: Prepared[Bucket]
    samples: Prepared[RowBucket]
    others: Prepared[str]
    drafts: Prepared[DraftBucket] = dataclasses.field(default_factory=lambda: Prepared({}))
    launches: Prepared[LaunchBucket] = dataclasses.field(default_factory=lambda: Prepared({}))
    worth: Worth = dataclasses.field(default_factory=Worth)

    def __getitem__(self, name: str) -> Executable:
        """One of those beside steps, by its name."""
        return self.others[name]

    @property
    def _all(self) -> tuple[Prepared[Any], ...]:
        return self.others, self.samples, self.forwards, self.drafts, self.launches

    @property
    def num_loaded(self) -> int:
        return sum(prepared.num_loaded for prepared in self._all)

    def missing(self, ladder: Ladder) -> frozenset[Bucket | RowBucket]:
        """The buckets of a ladder that have no executable yet, or none of the draft behind them."""
        there = [b for b in self.forwards if all(draft in self.drafts for draft in ladder.drafts_of((b,)))]
        return frozenset((*ladder.buckets, *ladder.row_buckets)) - {*there} - self.samples.keys()

    def put(self, part: StepPart, executable: DeferredExecutable) -> None:
        """Adds a part that was missing; the next steps may take it."""
        kept: dict[type, Prepared[Any]] = {
            Bucket: self.forwards,
            DraftBucket: self.drafts,
            LaunchBucket: self.launches,
            RowBucket: self.samples,
        }
        kept[type(part)].put(part, executable)

    def want(self, plan: StepPlan, ladder: Ladder, there: Ladder, head_share: float) -> None:
        """Counts the padding that missing executables would have saved a step, and a step that was cut to the largest.

        ladder, there: all buckets, and those that are there. head_share: a row's logits over a token's layers.
        """
        (_, bucket), (_, best) = there.laid_out(plan), ladder.laid_out(plan)
        rows, best_rows = there.row_bucket_of(plan), ladder.row_bucket_of(plan)
        if best != bucket:
            self.worth.want(best, Saving(tokens=bucket.num_tokens - best.num_tokens))
        if best_rows != rows:
            self.worth.want(best_rows, Saving(tokens=(rows.num_rows - best_rows.num_rows) * head_share))
        most = there.most_tokens
        if most is not None and max(shard.num_tokens for shard in plan.shards) == most:
            kind = ladder.for_steps(adapted=plan.is_adapted, imaged=plan.has_images)
            for larger in (b for b in kind if not b.decode_only and b.num_tokens > most):
                self.worth.want(larger, Saving(steps=1 - most / larger.num_tokens))

    def load(self) -> None:
        """Loads every executable that is not loaded yet."""
        for prepared in self._all:
            list(prepared.values())

    def __len__(self) -> int:
        return sum(map(len, self._all))


def programs_of(layout: Layout, launches: Iterable[LaunchBucket] = ()) -> dict[Part, Program]:
    """The program of each part: forwards and what samples, the smallest first, these launches, then the others."""
    pools, options, mesh, head = layout.pools, layout.options, layout.mesh, layout.head
    text = f"{dict(mesh.shape)} {options} {options.spec.digest_text()}"
    whole = f"{describe((layout.decoder_targets, pools.caches, pools.slots, pools.hidden))} {text}"
    of_rows = (head.shapes, pools.slots, pools.prompts, pools.masks, pools.hidden)  # blocks may be of any number
    rows = f"{describe(of_rows)} {text}"

    def program(what: str, shapes: str, trace: Callable[[], jax.stages.Traced], effort: int = 1) -> Program:
        return Program(what=what, shapes=shapes, mesh=mesh, trace=trace, effort=effort)

    def forward(bucket: Bucket) -> Program:
        adapters = layout.adapters if bucket.adapted else None
        images = layout.images if bucket.imaged and isinstance(layout.images, ImageSlots) else None
        own = (layout.graph, layout.decoder_targets, pools, bucket, options, mesh, adapters)
        trace = functools.partial(trace_forward, *own, images and images.pool)
        effort = _FORWARD_EFFORT + bucket.num_tokens // _EFFORT_TOKENS
        shapes = whole if adapters is None else f"{describe(adapters.pools)} {whole}"
        shapes = shapes if images is None else f"{describe(images.pool)} {shapes}"
        return _in_layers(program(f"forward {bucket}", shapes, trace, effort), layout, bucket)

    def sample(bucket: RowBucket) -> Program:
        trace = functools.partial(trace_sample, head, pools, bucket, options, mesh)
        return program(str(bucket), rows, trace, _SAMPLE_EFFORT)

    def launch(bucket: LaunchBucket) -> Program:
        trace = functools.partial(trace_launch, head, pools, bucket, mesh)
        return _in_layers(program(str(bucket), whole, trace, _LAUNCH_EFFORT), layout, bucket.forward)

    def draft(bucket: DraftBucket) -> Program:
        layer = layout.draft_layer
        assert layer is not None, "a ladder has drafts where a layer predicts them"
        trace = functools.partial(trace_draft, layer, pools, bucket, mesh)
        effort = _SAMPLE_EFFORT + bucket.forward.num_tokens // _EFFORT_TOKENS
        return dataclasses.replace(program(str(bucket), whole, trace, effort), kernels=_kernels_of(layout))

    traces: dict[str, Callable[[], jax.stages.Traced]] = {
        "write_slot": lambda: trace_write_slot(pools, mesh),
        "write_masks": lambda: trace_write_masks(pools, mesh),
        "write_drafts": lambda: trace_write_drafts(pools, mesh),
        "copy_blocks": lambda: trace_copies(pools, options.spec.cache_groups, mesh),
        "fresh_pools": lambda: trace_fresh(pools),
    }
    kept = f"{describe((pools.caches, pools.slots, pools.prompts, pools.masks, pools.hidden))} {dict(mesh.shape)}"
    parts: dict[Part, Program] = {
        **{bucket: forward(bucket) for bucket in layout.ladder.buckets},
        **{bucket: sample(bucket) for bucket in layout.ladder.row_buckets},
        **{bucket: draft(bucket) for bucket in layout.ladder.drafts_of(layout.ladder.buckets)},
        **{bucket: launch(bucket) for bucket in launches},
        "score": program("score", rows, lambda: trace_score(head, pools, options, mesh), _SAMPLE_EFFORT // 2),
        "score_all": program("score all", rows, lambda: trace_score(head, pools, options, mesh, every=True)),
        **{name: program(name.replace("_", " "), kept, trace) for name, trace in traces.items()},
    }
    if (adapters := layout.adapters) is not None:
        shapes = f"{describe((adapters.pools, adapters.staged))} {dict(mesh.shape)}"
        parts["write_adapter"] = program("write adapter", shapes, lambda: trace_write_adapter(adapters, mesh))
        parts["fresh_adapters"] = program("fresh adapters", shapes, lambda: trace_fresh_adapters(adapters))
    parts |= _programs_of_tower(layout.images, program, text, mesh)
    fresh = dataclasses.replace(parts["fresh_pools"], is_kept=not are_untouched(pools))
    return parts | {"fresh_pools": fresh}


def _in_layers(part: Program, layout: Layout, bucket: Bucket) -> Program:
    """A program that runs the layers of a bucket, with their kernels, and in pieces where it is cut."""
    cut: dict[str, Any] = {}
    if (together := _layers_together(layout, bucket)) is not None:
        options_of = compiler_options(layout.options)
        cut = {"pieces_at": run_layer.__name__, "together": together, "compiler_options": options_of}
    return dataclasses.replace(part, kernels=_kernels_of(layout), **cut)


def _programs_of_tower(
    slots: ImageSlots | ClipSlots | None, program: Callable[..., Program], text: str, mesh: Mesh
) -> dict[Part, Program]:
    if slots is None:
        return {}

    def encoder(part: str, size: int, arrays: Any, trace: Callable[[], jax.stages.Traced]) -> dict[Part, Program]:
        return {part: program(part, f"{describe(arrays)} {text}", trace, _FORWARD_EFFORT + size // _EFFORT_TOKENS)}

    if isinstance(slots, ClipSlots):  # its pools are made with those of other layers
        arrays = (slots.weights, slots.pools)
        return encoder(slots.parts[0], slots.max_patches, arrays, lambda: trace_encode_clip(slots, mesh))
    shapes = f"{describe((slots.weights, slots.pool))} {text}"
    parts: dict[Part, Program] = {
        OF_IMAGES: program("fresh images", shapes, lambda: trace_fresh_images(slots)),
    }
    for own in slots.encoders:
        for size in own.sizes:
            trace = functools.partial(trace_encode, slots, own, size, mesh)
            parts |= encoder(call_name(own.tower, size), size, (own.weights, slots.pool), trace)
    return parts


def parts_of_tower(layout: Layout) -> tuple[str, ...]:
    """The programs that fill slots of images or clips, in order of use; () for a model of text alone."""
    if layout.images is None:
        return ()
    fresh = () if isinstance(layout.images, ClipSlots) else (OF_IMAGES,)
    return (*fresh, *layout.images.parts)


def _layers_together(layout: Layout, bucket: Bucket) -> int | None:
    """How many layers are one piece of a forward; None for a forward that is whole: on accelerators and meshes, and
    where pieces that take long enough would be so few that nothing is gained."""
    if layout.mesh.size > 1 or layout.mesh.devices.flat[0].platform != "cpu":
        return None
    num_layers = layout.spec.num_hidden_layers
    num_bytes = sum(weight.size * weight.dtype.itemsize for weight in _weights_of_layers(layout))
    of_layer = num_bytes / num_layers * max(1, bucket.num_tokens // TOKENS_AS_BYTES)
    together = max(1, math.ceil(MIN_PIECE_BYTES / of_layer))
    return together if together * 3 <= num_layers or MIN_PIECE_BYTES == 0 else None


def _kernels_of(layout: Layout) -> str:
    """The sizes that a step's kernels are specialised to on a device, in words; "" without kernels."""
    options, own = layout.options, layout.options.local.attention
    if options.implementation == "xla":
        return ""
    return (
        f"attention {options.implementation!r} of {own.num_attention_heads} heads, {own.num_key_value_heads} of KV, of "
        f"{own.head_dim} {layout.dtype.name} values and {layout.kv_dtype} KV in blocks of "
        f"{options.block_size} tokens"
    )


def largest_first(parts: Iterable[Part], layout: Layout) -> list[Part]:
    """Parts in the order in which they are compiled: one that takes long, alone at the end, would leave cores idle."""
    sizes = [part for part in parts if not isinstance(part, str)]
    tried = [part for part in layout.ladder.largest_parts if part in sizes]
    return [*tried, *(part for part in reversed(sizes) if part not in tried), *others_of(layout)]


def others_of(layout: Layout) -> tuple[str, ...]:
    """The names of what stands beside steps."""
    images = parts_of_tower(layout)
    return (*OTHERS, *(() if layout.adapters is None else OF_ADAPTERS), *images)


def compile_all(
    layout: Layout,
    *,
    executable_cache: ExecutableCache | None,
    first: ExecutableStore | None = None,
    on_done: Callable[[int, int], None] = lambda done, total: None,
    abandoned: threading.Event | None = None,
) -> Executables:
    """The executable of every part; see `make_all`.

    first: with a store, only those that it has, and those without which some request could not be served. What gives
    prompt log-probabilities is compiled when it is asked for first, before the request that asks is queued.
    """
    programs = programs_of(layout)
    later: dict[Part, DeferredExecutable] = {}
    if first is not None:
        needed = {*_first_parts(layout), *others_of(layout)} - set(OF_SCORES)
        needed |= {*layout.ladder.drafts_of(part for part in needed if isinstance(part, Bucket))}
        there = {part: p for part, p in programs.items() if part in needed or first.has(p.description)}
        later = {name: _when_asked(programs[name], executable_cache) for name in OF_SCORES if name not in there}
        programs = there
    made = make_all(
        {part: programs[part] for part in largest_first(programs, layout) if part in programs},
        (part for part in in_order_of_use(layout) if part in programs),
        executable_cache=executable_cache,
        on_done=on_done,
        abandoned=abandoned,
    )
    return Executables(
        forwards=Prepared({bucket: made[bucket] for bucket in layout.ladder.buckets if bucket in made}),
        samples=Prepared({bucket: made[bucket] for bucket in layout.ladder.row_buckets if bucket in made}),
        others=Prepared({name: made.get(name) or later[name] for name in others_of(layout)}),
        drafts=Prepared({part: executable for part, executable in made.items() if isinstance(part, DraftBucket)}),
    )


def _when_asked(program: Program, executable_cache: ExecutableCache | None) -> DeferredExecutable:
    return DeferredExecutable(lambda: program.get(executable_cache).result(), compiles=True)


def in_order_of_use(layout: Layout) -> Iterator[Part]:
    """All parts in order of first use: pools, then a prompt before its decodes, small before large."""
    yield from ("fresh_pools", "write_slot")
    rows: Sequence[RowBucket] = layout.ladder.row_buckets
    for buckets in layout.ladder.kinds.values():
        mixed, decode = ([bucket for bucket in buckets if bucket.decode_only == kind] for kind in (False, True))
        for parts in itertools.zip_longest(mixed, rows, decode):
            there = [part for part in parts if part is not None]
            yield from there
            yield from layout.ladder.drafts_of(part for part in there if isinstance(part, Bucket))
        rows = ()
    yield from ("copy_blocks", "write_masks", "write_drafts", "score", "score_all")
    yield from () if layout.adapters is None else reversed(OF_ADAPTERS)
    yield from parts_of_tower(layout)


def _first_parts(layout: Layout) -> list[Bucket | RowBucket]:
    """The ladder's parts that a start compiles: no decode bucket for a model so small that its compile pays late."""
    parts = layout.ladder.first_parts(_first_tokens(layout))
    if sum(weight.size for weight in _weights_of_layers(layout)) >= DECODES_AT_ONCE:
        return [*parts]
    return [part for part in parts if isinstance(part, RowBucket) or not part.decode_only]


def _weights_of_layers(layout: Layout) -> list[jax.ShapeDtypeStruct]:
    return [target for name, target in layout.decoder_targets.items() if name.startswith("layers.")]


def _first_tokens(layout: Layout) -> int:
    """Tokens of the first forward: an image whose tokens see each other is computed in one step, beside all rows."""
    vision = None if layout.images is None else layout.spec.vision
    if vision is None or not vision.sees_both_ways:
        return FIRST_TOKENS
    if vision.tokens_of_all is None:  # images of any size that a step holds
        return max(bucket.num_tokens for bucket in layout.ladder.buckets)
    return max(FIRST_TOKENS, vision.tokens_of_all + layout.ladder.row_buckets[-1].num_rows)
