"""Attention of rows with several queries (prefill chunks, encoders) for the TPU, in Mosaic.

One launch walks the query tiles of the step. For a query tile it walks the KV tiles that hold what the tile may see;
their blocks come by DMA, one KV tile ahead, across query tiles too. The keys of a KV tile are cut into steps and the
query tile into chunks: an *item* is (step, KV head, chunk). Its three phases run as a pipeline over items,

    keys      item i + 1    logits = q k^T                       MXU
    softmax   item i        weights, running maximum and sum     VALU, EUP
    values    item i        sums = sums * kept + weights v       MXU

in one straight stretch of code: the MXU has keys to go on with while weights are made. It is written in parts of the
item's queries, for the compiler loads as much of q as it has registers for. Logits are in units of log2.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kv_pool import KVPool
from pallas_kernels.paged_attention.tpu_prefill_config import ALIGNMENT, LANES, PIECE, PrefillConfig, PrefillShape
from pallas_kernels.paged_attention.tpu_prefill_math import (
    HIDDEN,
    dot_keys,
    dot_values,
    fold_lanes,
    halves,
    repeat_lanes,
    softmax_step,
    visible,
)
from pallas_kernels.paged_attention.tpu_prefill_schedule import PrefillSchedule, Tile

_LOG2_E = 1.4426950408889634


def prefill_attention(
    q: jax.Array,  # [T, N, H]
    pool: KVPool,  # the step's own K and V are in it
    schedule: PrefillSchedule,
    *,
    scale: float,
    soft_cap: float | None,
    sinks: jax.Array | None,  # [N]
    interpret: Any = False,
) -> jax.Array:  # [T, N, H], the dtype of q; tokens of no query tile hold anything, NaN too
    """softmax(scale * q k^T + mask) v of the tokens of the schedule's query tiles, accumulated in float32."""
    T, N, H = q.shape
    values, scales = pool.values, pool.scales
    config, shape = schedule.config, PrefillShape.of(num_heads=N, dtype=q.dtype, pool=pool)
    config.check(shape)
    heads = _heads_first(q, scale * _LOG2_E if soft_cap is None else scale / soft_cap, config.tile_q, shape.lanes)
    arguments = [heads, values.reshape(len(values), -1, shape.lanes) if shape.is_dense else values]
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    specs = [anywhere, anywhere]
    if scales is not None:
        arguments.append(scales)
        specs.append(anywhere)
    if sinks is not None:
        lanes = (len(sinks), 1, LANES)
        arguments.append(jnp.broadcast_to(sinks.astype(jnp.float32)[:, None, None] * _LOG2_E, lanes))
        specs.append(pl.BlockSpec(memory_space=pltpu.VMEM))
    out = pl.pallas_call(
        functools.partial(
            _kernel,
            shape=shape,
            config=config,
            max_blocks=schedule.max_blocks,
            window=schedule.window,
            causal=schedule.causal,
            cap=None if soft_cap is None else soft_cap * _LOG2_E,
            has_scales=scales is not None,
            has_sinks=sinks is not None,
        ),
        out_shape=jax.ShapeDtypeStruct(heads.shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(1,),
            in_specs=specs,
            out_specs=anywhere,
            scratch_shapes=[
                {name: pltpu.VMEM(size, jnp.dtype(dtype)) for name, (size, dtype) in config.buffers(shape).items()},
                {name: pltpu.SemaphoreType.DMA(()) for name in ("q", "blocks", "out")},
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=config.vmem_bytes(shape) * 5 // 4 + 2**21, disable_bounds_checks=True
        ),
        interpret=interpret,
        name="prefill_attention",
    )(schedule.num_tiles, schedule.tiles, schedule.block_tables, *arguments)
    out = out[..., H : 2 * H] if shape.is_packed else out[..., :H]
    return out[:, :T].transpose(1, 0, 2)


def _heads_first(q: jax.Array, factor: float, tile_q: int, lanes: int) -> jax.Array:  # -> [N, tokens, lanes]
    """q times factor, with tokens next to lanes as the kernel's matrix products want them."""
    T, _, H = q.shape
    tokens = -(-max(T, tile_q) // ALIGNMENT) * ALIGNMENT
    heads = (q.astype(jnp.float32) * factor).astype(q.dtype).transpose(1, 0, 2)
    return jnp.pad(heads, ((0, 0), (0, tokens - T), (0, lanes - H)))


def _kernel(num_tiles, tiles, block_tables, q, pool, *rest, has_scales: bool, has_sinks: bool, **static: Any) -> None:
    rest = list(rest)
    scales = rest.pop(0) if has_scales else None
    sinks = rest.pop(0) if has_sinks else None
    out, buffers, semaphores = rest
    _Walk(
        num_tiles=num_tiles[0],
        tiles=tiles,
        block_tables=block_tables,
        q=q,
        pool=pool,
        scales=scales,
        sinks=sinks,
        out=out,
        buffers=buffers,
        semaphores=semaphores,
        **static,
    ).run()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Walk:
    """The refs of a launch, and the phases of its work. t: query tile, j: KV tile, both int32 scalars.

    An item is (step, head, chunk) of a KV tile.
    """

    # prefetched scalars
    num_tiles: Any  # int32 scalar
    tiles: Any  # [tiles * 8]
    block_tables: Any  # [R * M]
    # in HBM
    q: Any  # [N, tokens, lanes]
    pool: Any  # [P, C * vectors, lanes] or [P, C, vectors, lanes]
    scales: Any  # [P, 2K, C] or None
    out: Any  # [N, tokens, lanes]
    # in VMEM
    sinks: Any  # [N, 1, 128] or None
    buffers: Any  # see PrefillConfig.buffers
    semaphores: Any
    # static
    shape: PrefillShape
    config: PrefillConfig
    max_blocks: int
    window: int | None
    causal: bool
    cap: float | None

    def run(self) -> None:
        @pl.when(self.num_tiles > 0)
        def _():
            first = Tile.read(self.tiles, jnp.int32(0))
            self._copy_q(0).start()
            self._fetch_blocks(first, first.first_kv)
            self.buffers["border"][...] = jnp.zeros_like(self.buffers["border"])
            jax.lax.fori_loop(0, self.num_tiles, lambda t, _: self._run_tile(t), None)
            self._wait_out(self.num_tiles - 1)

    def _run_tile(self, t) -> None:
        """All of one query tile: the pipeline over its items."""
        tile = Tile.read(self.tiles, t)
        self._start(tile)
        self._copy_q(t).wait()

        @pl.when(t + 1 < self.num_tiles)
        def _():
            self._copy_q(t + 1).start()

        self._enter(t, tile, tile.first_kv)
        first = self._first_of(tile, tile.first_kv)
        for part in range(self.config.parts):
            self._keys(t, first, part, 0)
        jax.lax.fori_loop(tile.first_kv, tile.end_kv, lambda j, i: self._run_kv_tile(t, tile, j, i), jnp.int32(0))
        self._finish(t, tile)

    def _run_kv_tile(self, t, tile: Tile, j, i) -> Any:
        """The items of one KV tile; i and the result count the query tile's items so far."""
        (first_step, end_step), (first_chunk, end_chunk) = self._steps_of(tile, j), self._chunks_of(tile, j)
        last = i + (end_step - first_step) * self.shape.num_kv_heads * (end_chunk - first_chunk) - 1
        following = self._first_of(tile, jnp.minimum(j + 1, tile.end_kv - 1))

        def one_item(i, item):
            after = self._advance(item, first_chunk, end_chunk)

            @pl.when((i == last) & (j + 1 < tile.end_kv))
            def _():
                self._enter(t, tile, j + 1)

            ahead = tuple(jnp.where(i == last, a, b) for a, b in zip(following, after, strict=True))
            has_hidden = self._has_hidden(tile, j, item)

            def run(slot: int, masked: bool) -> None:
                for part in range(self.config.parts):
                    self._softmax(tile, j, item, part, slot, masked)
                    self._keys(t, ahead, part, 1 - slot)
                    self._values(j, item, part)

            for slot in (0, 1):

                @pl.when(i % 2 == slot)
                def _(slot=slot):
                    pl.when(has_hidden)(lambda: run(slot, True))
                    pl.when(~has_hidden)(lambda: run(slot, False))

            return after

        jax.lax.fori_loop(i, last + 1, one_item, (first_step, jnp.int32(0), first_chunk))
        return last + 1

    # Items

    def _first_of(self, tile: Tile, j) -> tuple[Any, Any, Any]:
        """The first item of KV tile j."""
        return self._steps_of(tile, j)[0], jnp.int32(0), self._chunks_of(tile, j)[0]

    def _advance(self, item, first_chunk, end_chunk) -> tuple[Any, Any, Any]:
        """The item that follows in the KV tile: chunks change first, then heads, then steps."""
        step, head, chunk = item
        is_last_chunk = chunk + 1 == end_chunk
        is_last_head = is_last_chunk & (head + 1 == self.shape.num_kv_heads)
        head = jnp.where(is_last_head, 0, jnp.where(is_last_chunk, head + 1, head))
        return jnp.where(is_last_head, step + 1, step), head, jnp.where(is_last_chunk, first_chunk, chunk + 1)

    def _steps_of(self, tile: Tile, j) -> tuple[Any, Any]:
        """Steps first .. end - 1 of KV tile j hold what the query tile may see."""
        start, size = j * self.config.tile_kv, self.config.step_kv
        end = jnp.minimum(pl.cdiv(tile.end_position - start, size), self.config.steps)
        return jnp.maximum(tile.oldest(self.window) - start, 0) // size, end

    def _chunks_of(self, tile: Tile, j) -> tuple[Any, Any]:
        """Chunks first .. end - 1 of the query tile have a query that sees a key of KV tile j."""
        size, start = self.config.chunk_q, j * self.config.tile_kv
        first, end = tile.first_lane, tile.end_lane
        if self.causal:
            first = jnp.maximum(first, start - tile.position)
        if self.window is not None:
            end = jnp.minimum(end, start + self.config.tile_kv - 1 + self.window - tile.position)
        return first // size, pl.cdiv(end, size)

    def _slot_of(self, item) -> Any:
        """Where the running maximum and sums of the item's head and chunk are kept."""
        return item[1] * self.config.chunks + item[2]

    def _start_of(self, j, item) -> Any:
        """Position of the item's first key."""
        return j * self.config.tile_kv + item[0] * self.config.step_kv

    def _has_hidden(self, tile: Tile, j, item) -> Any:
        """Whether some query of the item may not see some key of it."""
        start, first = self._start_of(j, item), item[2] * self.config.chunk_q
        low = tile.position + jnp.maximum(first, tile.first_lane)
        high = tile.position + jnp.minimum(first + self.config.chunk_q, tile.end_lane) - 1
        hidden = start + self.config.step_kv > (low + 1 if self.causal else tile.end_position)
        return hidden if self.window is None else hidden | (start <= high - self.window)

    # Phases of a part of an item

    def _rows(self, part: int) -> Any:
        rows = self.shape.group * self.config.part_q
        return pl.ds(part * rows, rows)

    def _tokens(self, chunk, part: int) -> Any:
        first = chunk * self.config.chunk_q + part * self.config.part_q
        return pl.ds(pl.multiple_of(first, ALIGNMENT), self.config.part_q)

    def _keys(self, t, item, part: int, slot: int) -> None:
        step, head, chunk = item
        G = self.shape.group
        q = self.buffers["q"][t % 2, pl.ds(head * G, G), self._tokens(chunk, part), :]
        logits = dot_keys(q.reshape(-1, self.shape.lanes), self.buffers["keys"][step, head])
        self.buffers[f"logits{slot}"][self._rows(part)] = logits

    def _softmax(self, tile: Tile, j, item, part: int, slot: int, masked: bool) -> None:
        step, head, chunk = item
        buffers, rows, at = self.buffers, self._rows(part), self._slot_of(item)
        logits = buffers[f"logits{slot}"][rows]
        if self.scales is not None:
            logits = logits * buffers["scales"][j % 2, step, head, pl.ds(0, 1), :]
        if self.cap is not None:
            logits = self.cap * jnp.tanh(logits)
        if masked:
            seen = visible(
                (self.config.part_q, self.config.step_kv),
                first_query=tile.position + chunk * self.config.chunk_q + part * self.config.part_q,
                first_key=self._start_of(j, item),
                end_position=tile.end_position,
                window=self.window,
                causal=self.causal,
            )
            heads = logits.reshape(self.shape.group, *seen.shape)
            logits = jnp.where(seen[None], heads, HIDDEN).reshape(logits.shape)
        weights, highest, kept = softmax_step(logits, buffers["highest"][at, rows])
        buffers["highest"][at, rows] = highest
        buffers["total"][at, rows] = buffers["total"][at, rows] * kept + fold_lanes(weights)
        buffers["kept"][rows] = kept
        if self.scales is not None:
            weights = weights * buffers["scales"][j % 2, step, head, pl.ds(1, 1), :]
        buffers["weights"][rows] = weights.astype(self.shape.dtype)

    def _values(self, j, item, part: int) -> None:
        step, head, _ = item
        buffers, rows, at = self.buffers, self._rows(part), self._slot_of(item)
        added = dot_values(buffers["weights"][rows], buffers["values"][j % 2, step, head])
        kept = repeat_lanes(buffers["kept"][rows], self.shape.lanes)
        buffers["sums"][at, rows] = buffers["sums"][at, rows] * kept + added

    # Query tiles

    def _start(self, tile: Tile) -> None:
        """Empty sums; a sink is a logit that has been seen and has no value."""

        def one_chunk(head, chunk) -> None:
            at = head * self.config.chunks + chunk
            for name in ("highest", "total", "sums"):
                buffer = self.buffers[name]
                buffer[at] = jnp.full(buffer.shape[1:], HIDDEN if name == "highest" else 0.0, jnp.float32)
            if self.sinks is not None:
                size = (self.shape.group, self.config.part_q, LANES)
                sinks = jnp.broadcast_to(self.sinks[pl.ds(head * size[0], size[0])], size).reshape(-1, LANES)
                for part in range(self.config.parts):
                    self.buffers["highest"][at, self._rows(part)] = sinks
                self.buffers["total"][at] = jnp.full(self.buffers["total"].shape[1:], 1 / LANES, jnp.float32)

        self._for_chunks(tile, one_chunk)

    def _for_chunks(self, tile: Tile, run) -> None:
        first, end = tile.first_lane // self.config.chunk_q, pl.cdiv(tile.end_lane, self.config.chunk_q)

        @pl.loop(0, self.shape.num_kv_heads)
        def _(head):
            @pl.loop(first, end)
            def _(chunk):
                run(head, chunk)

    def _copy_q(self, t):
        first = pl.multiple_of(Tile.read(self.tiles, t).first_token, ALIGNMENT)
        source = self.q.at[:, pl.ds(first, self.config.tile_q), :]
        return pltpu.make_async_copy(source, self.buffers["q"].at[t % 2], self.semaphores["q"])

    def _finish(self, t, tile: Tile) -> None:
        """Writes the results of the tile's row, in whole groups of ALIGNMENT tokens.

        A group that an earlier tile wrote keeps that tile's tokens, which are those before the row's first.
        """

        @pl.when(t > 0)
        def _():
            self._wait_out(t - 1)

        out, G = self.buffers["out"], self.shape.group

        def one_chunk(head, chunk) -> None:
            at = head * self.config.chunks + chunk
            for part in range(self.config.parts):
                rows = self._rows(part)
                total = jnp.sum(self.buffers["total"][at, rows], axis=1, keepdims=True)
                result = self.buffers["sums"][at, rows] / jnp.where(total > 0, total, 1.0)
                result = result.astype(out.dtype).reshape(G, self.config.part_q, self.shape.lanes)
                out[pl.ds(head * G, G), self._tokens(chunk, part), :] = result

        self._for_chunks(tile, one_chunk)
        border = self.buffers["border"]
        group = self._group(tile.first_lane // ALIGNMENT)
        lane = jax.lax.broadcasted_iota(jnp.int32, border.shape, 1)
        out[:, group, :] = jnp.where(lane < tile.first_lane % ALIGNMENT, border[...], out[:, group, :])
        border[...] = out[:, self._group((tile.end_lane - 1) // ALIGNMENT), :]
        self._for_groups(tile, lambda copy: copy.start())

    def _wait_out(self, t) -> None:
        self._for_groups(Tile.read(self.tiles, t), lambda copy: copy.wait())

    def _for_groups(self, tile: Tile, run) -> None:
        @pl.loop(tile.first_lane // ALIGNMENT, pl.cdiv(tile.end_lane, ALIGNMENT))
        def _(group):
            there = pl.ds(pl.multiple_of(tile.first_token + group * ALIGNMENT, ALIGNMENT), ALIGNMENT)
            source = self.buffers["out"].at[:, self._group(group), :]
            run(pltpu.make_async_copy(source, self.out.at[:, there, :], self.semaphores["out"]))

    def _group(self, group) -> Any:
        return pl.ds(pl.multiple_of(group * ALIGNMENT, ALIGNMENT), ALIGNMENT)

    # KV tiles

    def _enter(self, t, tile: Tile, j) -> None:
        """KV tile j of query tile t lies in `keys` and `values`; the blocks of the next one are on their way."""
        self._for_blocks(tile, j, lambda copy: copy.wait())
        first, end = self._steps_of(tile, j)

        @pl.loop(first, end)
        def _(step):
            self._take_apart(tile, j, step)

        @pl.when(j + 1 < tile.end_kv)
        def _():
            self._fetch_blocks(tile, j + 1)

        @pl.when((j + 1 == tile.end_kv) & (t + 1 < self.num_tiles))
        def _():
            following = Tile.read(self.tiles, t + 1)
            self._fetch_blocks(following, following.first_kv)

    def _fetch_blocks(self, tile: Tile, j) -> None:
        self._for_blocks(tile, j, lambda copy: copy.start())

    def _for_blocks(self, tile: Tile, j, run) -> None:
        """Only blocks that hold what the query tile may see."""
        C, in_tile = self.shape.block_size, self.config.tile_kv // self.shape.block_size
        first = jnp.maximum(tile.oldest(self.window) // C, j * in_tile)
        end = jnp.minimum(pl.cdiv(tile.end_position, C), (j + 1) * in_tile)

        @pl.loop(first, end)
        def _(block):
            id = self.block_tables[tile.row * self.max_blocks + block]
            place, semaphore = block - j * in_tile, self.semaphores["blocks"]
            if self.shape.is_dense:
                rows = C * self.shape.vectors
                into = self.buffers["blocks"].at[pl.ds(pl.multiple_of(place * rows, rows), rows)]
            else:
                into = self.buffers["blocks"].at[place]
            run(pltpu.make_async_copy(self.pool.at[id], into, semaphore))
            if self.scales is not None:
                into = self.buffers["block_scales"].at[place]
                run(pltpu.make_async_copy(self.scales.at[id], into, semaphore))

    def _take_apart(self, tile: Tile, j, step) -> None:
        """K and V of each head of a step, from blocks in which they alternate; what no query sees of V is zero."""
        size = self.config.step_kv
        start, oldest = j * self.config.tile_kv + step * size, tile.oldest(self.window)

        @pl.loop(0, size // PIECE)
        def _(piece):
            self._load_words(step * size + piece * PIECE)
            rows = pl.ds(pl.multiple_of(piece * PIECE, PIECE), PIECE)
            for head, (k, v) in enumerate(self._heads_of_words()):
                self.buffers["keys"][step, head, rows, :] = k
                self.buffers["values"][j % 2, step, head, rows, :] = v

        @pl.when((start + size > tile.end_position) | (start < oldest))
        def _():
            @pl.loop(0, self.shape.num_kv_heads)
            def _(head):
                v = self.buffers["values"].at[j % 2, step, head]
                position = start + jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0)
                v[...] = jnp.where((position >= oldest) & (position < tile.end_position), v[...], 0)

        if self.scales is not None:
            self._join_scales(j, step, oldest, tile.end_position)

    def _load_words(self, token) -> None:
        """PIECE tokens' vectors as 32-bit words, of which rows can be loaded with a stride."""
        blocks, words, C, Vn = self.buffers["blocks"], self.buffers["words"], self.shape.block_size, self.shape.vectors
        if self.shape.is_dense:
            vectors = blocks[pl.ds(pl.multiple_of(token * Vn, PIECE), PIECE * Vn), :]
        elif C > PIECE:
            vectors = blocks[token // C, pl.ds(token % C, PIECE)].reshape(PIECE * Vn, self.shape.lanes)
        else:
            vectors = blocks[pl.ds(token // C, PIECE // C)].reshape(PIECE * Vn, self.shape.lanes)
        for i in range(words.shape[0]):
            lanes = vectors[:, i * LANES : (i + 1) * LANES]
            if self.shape.has_pairs:
                words[i] = pltpu.bitcast(lanes.astype(jnp.bfloat16), jnp.uint32)
            else:
                words[i] = lanes.astype(jnp.float32)

    def _heads_of_words(self):
        """Yields K and V of each head, [PIECE, lanes]."""
        dtype, Vn, is_packed = self.shape.dtype, self.shape.vectors, self.shape.is_packed
        if self.shape.has_pairs:
            for pair in range(Vn // 2):
                low, high = halves(self._strided_words(pair, Vn // 2), dtype)
                yield from ((low, low), (high, high)) if is_packed else ((low, high),)
        else:
            vectors = [self._strided_words(i, Vn).astype(dtype) for i in range(Vn)]
            yield from zip(vectors, vectors, strict=True) if is_packed else zip(*[iter(vectors)] * 2, strict=True)

    def _strided_words(self, first: int, stride: int) -> jax.Array:  # [PIECE, lanes]
        words = self.buffers["words"]
        parts = [words[i, pl.Slice(first, PIECE, stride), :] for i in range(words.shape[0])]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)

    def _join_scales(self, j, step, oldest, end_position) -> None:
        """Scales of a step with its tokens side by side, zero for what no query sees."""
        C, size, K = self.shape.block_size, self.config.step_kv, self.shape.num_kv_heads
        for i in range(size // C):
            scales = self.buffers["block_scales"][step * (size // C) + i]  # [2K, C]
            position = j * self.config.tile_kv + step * size + i * C + jax.lax.broadcasted_iota(jnp.int32, (1, C), 1)
            scales = jnp.where((position >= oldest) & (position < end_position), scales, 0.0)
            for head in range(K):
                self.buffers["scales"][j % 2, step, head, :, i * C : (i + 1) * C] = scales[2 * head : 2 * head + 2]
